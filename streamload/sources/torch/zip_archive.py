"""The directory of a zip archive: where each stored record's bytes are. ZIP64 included.

``torch.save`` stores its records; those that another tool deflated are read too. Layout
after PKWARE's APPNOTE 6.3; offsets come from the local headers, because torch pads these (and
only these) so that data starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from streamload.core.errors import CheckpointError
from streamload.sources.files import Readable

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MAX_COMMENT_BYTES = 0xFFFF
_MAX_DIRECTORY_BYTES = 256 << 20
# torch.save takes at least 300 bytes for a record, its entry and what the pickle says of it.
_RECORDS, _BYTES_PER_RECORD = 20_000, 200
_ENCRYPTED = 0x1
# Flags of writers of plain records: sizes behind the data, and names in UTF-8.
_PLAIN_FLAGS = 0x808 | _ENCRYPTED
_DEFLATED = 8
_LEVEL_FLAGS = 0x6
# Deflate cannot do better than 1032 to 1.
_MAX_RATIO = 1032


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive, by its directory entry.

    ``checksum`` is the CRC-32 of the data; 0 where the writer left it out, as torch can.
    """

    name: bytes
    header_offset: int
    nbytes: int
    stored_nbytes: int
    checksum: int
    compressed: bool
    encrypted: bool

    def __str__(self) -> str:
        return repr(self.name.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Archive:
    """An open zip archive: its records by name; their bytes end before ``end``."""

    file: Readable
    records: Mapping[bytes, Record]
    end: int

    def locate(self, record: Record) -> int:
        """Offset in the file of the record's first byte.

        Raises:
            CheckpointError: encrypted, or directory and record disagree.
        """
        if record.encrypted:
            raise CheckpointError(f"the record {record} is encrypted; such files are not read")
        if record.header_offset + _LOCAL.size + len(record.name) > self.end:
            raise _damaged(f"the record {record} lies outside the file")
        head = self.file.read(record.header_offset, self._guess(record))
        fields = _LOCAL.unpack_from(head)
        name_bytes, extra_bytes = int(fields[9]), int(fields[10])
        start = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if fields[0] != b"PK\3\4" or head[_LOCAL.size :][:name_bytes] != record.name:
            raise _damaged(f"the record {record} is not where the directory says")
        if start + record.stored_nbytes > self.end:
            raise _damaged(
                f"the record {record} should end at byte {start + record.stored_nbytes}, "
                f"its archive's records at {self.end}",
            )
        extra = head[_LOCAL.size + name_bytes :][:extra_bytes]
        if len(extra) < extra_bytes:
            extra = self.file.read(start - extra_bytes, extra_bytes)
        if not _is_extra_field(extra):
            raise _damaged(f"the header of the record {record} is damaged")
        return start

    def locate_all(self) -> dict[bytes, int]:
        """As ``locate``, for each record by its name."""
        if self.file.is_remote:  # asked for one after the other, each would wait for an answer
            for record in self.records.values():
                self.file.advise(record.header_offset, self._guess(record), needed=True)
        return {record.name: self.locate(record) for record in self.records.values()}

    def _guess(self, record: Record) -> int:
        """Bytes that are likely to hold all of a record's local header."""
        guess = _LOCAL.size + len(record.name) + 160
        return min(guess, self.end - record.header_offset)

    def read(self, record: Record, *, max_bytes: int) -> bytes:
        """All bytes of a small record, checked against its checksum.

        Raises:
            CheckpointError: too large, damaged, or encrypted.
        """
        if record.nbytes > max_bytes:
            raise CheckpointError(
                f"the record {record} has {record.nbytes} bytes; the limit is {max_bytes}"
            )
        found = self.file.read(self.locate(record), record.stored_nbytes)
        data = inflated(found, record.nbytes) if record.compressed else found
        if data is None:
            raise _damaged(f"the compressed bytes of the record {record}")
        if record.checksum and zlib.crc32(data) != record.checksum:
            raise _damaged(f"the checksum of the record {record} does not fit its bytes")
        return data


def read_archive(file: Readable) -> Archive:
    """The records of a zip archive, from its directory alone.

    Raises:
        CheckpointError: no directory at the end (the file was cut), or a damaged one.
    """
    count, size, start = _find_directory(file)
    data = file.read(start, size)
    records: dict[bytes, Record] = {}
    position = 0
    for _ in range(count):
        record, position = _read_entry(data, position)
        if record.name in records:
            raise _damaged(f"the record {record} appears twice")
        records[record.name] = record
    if position != size:
        raise _damaged(f"its directory has {size} bytes, its entries {position}")
    return Archive(file, records, start)


def _find_directory(file: Readable) -> tuple[int, int, int]:
    """Entries, bytes and offset of the directory."""
    tail_start = max(0, file.size_bytes - _END.size - _MAX_COMMENT_BYTES)
    tail = file.read(tail_start, file.size_bytes - tail_start)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise CheckpointError(
            f"the zip archive has no directory at its end: the file was cut short "
            f"({file.size_bytes} bytes are there)"
        )
    _, disk, first_disk, _, count, size, start, comment_bytes = _END.unpack_from(tail, at)
    end = tail_start + at
    if end + _END.size + comment_bytes != file.size_bytes or disk or first_disk:
        raise _damaged("the bytes after its directory are not a zip archive's end")
    locator_at = end - _LOCATOR64.size
    if locator_at >= 0:
        locator = file.read(locator_at, _LOCATOR64.size)
        if locator.startswith(b"PK\6\7"):
            _, disk, end, disks = _LOCATOR64.unpack(locator)
            if end + _END64.size > locator_at or disk or disks != 1:
                raise _damaged("the end of its directory lies outside the file")
            fields = _END64.unpack(file.read(end, _END64.size))
            if fields[0] != b"PK\6\6" or fields[4] or fields[5] or fields[6] != fields[7]:
                raise _damaged("the end of its directory is not where it should be")
            count, size, start = fields[7], fields[8], fields[9]
    if start + size > end or count * _CENTRAL.size > size:
        raise _damaged(f"its directory of {size} bytes at byte {start} does not fit the file")
    if count > _RECORDS + file.size_bytes // _BYTES_PER_RECORD:
        raise _damaged(f"its directory has {count} entries, too many for a file of its size")
    if size > _MAX_DIRECTORY_BYTES:
        raise _damaged(f"its directory has {size} bytes; the limit is {_MAX_DIRECTORY_BYTES}")
    return count, size, start


def _read_entry(data: bytes, position: int) -> tuple[Record, int]:
    if position + _CENTRAL.size > len(data):
        raise _damaged("its directory ends early")
    fields = _CENTRAL.unpack_from(data, position)
    flags, method, checksum = fields[3], fields[4], fields[7]
    packed, nbytes, offset = fields[8], fields[9], fields[16]
    name_at = position + _CENTRAL.size
    extra_at = name_at + fields[10]
    following = extra_at + fields[11] + fields[12]
    if fields[0] != b"PK\1\2" or following > len(data):
        raise _damaged("an entry of its directory is damaged")
    if 0xFFFFFFFF in (packed, nbytes, offset):
        wide = _zip64_values(data[extra_at : extra_at + fields[11]])
        sizes = (nbytes, packed, offset)
        if len(wide) < sizes.count(0xFFFFFFFF):
            raise _damaged("an entry of its directory lacks its 64-bit sizes")
        values = iter(wide)
        nbytes, packed, offset = (next(values) if n == 0xFFFFFFFF else n for n in sizes)
    if method == 0 and packed != nbytes:
        raise _damaged("an entry of its directory has two sizes")
    if method not in (0, _DEFLATED):
        raise CheckpointError(
            f"an entry of its zip directory is compressed by method {method}; only files as "
            "torch.save writes them, or deflated, can be read"
        )
    if nbytes > packed * _MAX_RATIO + 64 or packed > nbytes + (nbytes >> 6) + 64:
        raise _damaged("an entry of its directory claims more bytes than it can hold, or fewer")
    if flags & ~(_PLAIN_FLAGS | (_LEVEL_FLAGS if method else 0)) or fields[13]:
        raise _damaged("an entry of its directory is of a kind that torch does not write")
    record = Record(
        name=data[name_at:extra_at],
        header_offset=offset,
        nbytes=nbytes,
        stored_nbytes=packed,
        checksum=checksum,
        compressed=method != 0,
        encrypted=bool(flags & _ENCRYPTED),
    )
    return record, following


def inflated(data: bytes, nbytes: int) -> bytes | None:
    """The ``nbytes`` bytes that deflated ``data`` holds; None if it holds anything else."""
    reader = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        result = reader.decompress(data, nbytes + 1)
    except zlib.error:
        return None
    return result if reader.eof and len(result) == nbytes else None


def _zip64_values(extra: bytes) -> list[int]:
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            part = extra[position + 4 : position + 4 + size]
            return [value for (value,) in struct.iter_unpack("<Q", part[: len(part) // 8 * 8])]
        position += 4 + size
    return []


def _is_extra_field(extra: bytes) -> bool:
    """True if the bytes are whole (id, size, data) fields; a wrong length moves the data."""
    position = 0
    while position + 4 <= len(extra):
        position += 4 + int.from_bytes(extra[position + 2 : position + 4], "little")
    return position == len(extra) or (position < len(extra) and not any(extra[position:]))


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"damaged zip archive: {what}")
