"""The format ``torch.save`` wrote before the zip one: pickles one after the other, then storages.

Layout (``torch.serialization._legacy_save``): a magic number, a protocol version, facts of the
writing machine, the object, the sorted storage keys; then for each key the number of elements as
a little-endian int64 and the elements, little-endian too.
"""

from __future__ import annotations

import re

from streamload.sources.files import ReadableFile
from streamload.sources.torch.pickle_reader import MAX_PICKLE_BYTES, Pickled, Truncated, read_pickle
from streamload.sources.torch.pickle_records import Malformed, shown
from streamload.sources.torch.stored_tensors import Region

# The magic number as a pickle of protocol 2, and of any: 4 and 5 put a frame around it.
LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ANY_START = re.compile(rb"\x80[\2-\5](\x95\r\0{7})?" + re.escape(LEGACY_START[2:]))
_FIRST_WINDOW_BYTES = 256 << 10
_PROTOCOL_VERSION = 1001


def is_legacy(start: bytes) -> bool:
    """True for the first bytes of a file of this format."""
    return _ANY_START.match(start) is not None


def read_legacy(file: ReadableFile) -> tuple[Pickled, dict[str, Region]]:
    """The pickled object and where each storage that a tensor uses lies.

    Raises:
        Malformed: the pickles are damaged, or name what may not be read (Truncated: the file
            ends early).
    """
    window = _FIRST_WINDOW_BYTES
    while True:
        data = file.read(0, min(window, file.size_bytes))
        try:
            root, keys = _read_pickles(data, file.size_bytes)
            break
        except Truncated:
            if window >= min(file.size_bytes, MAX_PICKLE_BYTES):
                raise
            window *= 4
    return root, _find_storages(file, root, keys)


def _read_pickles(data: bytes, size: int) -> tuple[Pickled, Pickled]:
    magic = read_pickle(data, file_bytes=size)
    version = read_pickle(data, magic.end, file_bytes=size)
    if version.value != _PROTOCOL_VERSION:
        raise Malformed(f"protocol version {shown(version.value)}, expected {_PROTOCOL_VERSION}")
    machine = read_pickle(data, version.end, file_bytes=size)
    root = read_pickle(data, machine.end, file_bytes=size, legacy=True)
    return root, read_pickle(data, root.end, file_bytes=size)


def _find_storages(file: ReadableFile, root: Pickled, keys: Pickled) -> dict[str, Region]:
    names = keys.value if isinstance(keys.value, list) else []
    named = {name for name in names if isinstance(name, str)}
    if len(named) != len(names) or named != set(root.storages):
        raise Malformed("the list of storages does not fit the tensors")
    regions: dict[str, Region] = {}
    position = keys.end
    for key in names:
        ref = root.storages[key]
        regions[key] = Region(position + 8, ref.numel * ref.itemsize)
        end = regions[key].offset + regions[key].nbytes
        if end > file.size_bytes:
            raise Truncated(f"expected at least {end} bytes, found {file.size_bytes}")
        count = int.from_bytes(file.read(position, 8), "little", signed=True)
        if count != ref.numel:
            raise Malformed(f"the storage {key!r} has {count} elements, expected {ref.numel}")
        position = end
    return regions
