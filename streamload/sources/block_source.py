"""What all sources share whose bytes lie in open files, and how such files are opened together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from streamload.core.errors import CheckpointError, refuse
from streamload.core.specs import Extent, Shape
from streamload.core.wording import listed, plural, printable
from streamload.sources.base import Source
from streamload.sources.config.beside import adapter_beside, config_beside
from streamload.sources.files import OpenFile, ReadableFile, open_file
from streamload.sources.remote.ahead import MOST_BYTES
from streamload.sources.remote.remote_file import RemoteFile
from streamload.system.descriptors import too_many_open

if TYPE_CHECKING:
    import torch

    from streamload.sources.mapped_file import MappedFile

_T = TypeVar("_T")


class BlockSource(Source):
    """A source whose bytes lie in open files: block reads and hints by extent."""

    def __init__(self, path: str, files: Iterable[ReadableFile]) -> None:
        self.path = path
        self._files = {file.path: file for file in files}
        self._maps: dict[str, MappedFile] = {}
        self.is_remote = any(file.is_remote for file in self._files.values())
        self.buffer_bytes = MOST_BYTES if self.is_remote else 0

    @property
    def files(self) -> Collection[str]:
        return self._files

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        self._files[extent.file].read_into(extent.offset, buffer, tensor=tensor)

    def read_rows(
        self, first: Extent, stride_bytes: int, buffer: memoryview, *, tensor: str | None = None
    ) -> None:
        file = self._files[first.file]
        if isinstance(file, OpenFile):
            file.read_rows(first.offset, first.nbytes, stride_bytes, buffer, tensor=tensor)
        else:
            super().read_rows(first, stride_bytes, buffer, tensor=tensor)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        config, notices = self._beside
        return deepcopy(config), notices

    @cached_property
    def _beside(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Read once: of a checkpoint far away each time is a request."""
        return config_beside(self.path, self.catalog)

    def adapter(self) -> dict[str, Any] | None:
        return adapter_beside(self.path)

    def prefetch(self, extent: Extent) -> None:
        self._files[extent.file].advise(extent.offset, extent.nbytes, needed=True)

    def release(self, extent: Extent) -> None:
        self._files[extent.file].advise(extent.offset, extent.nbytes, needed=False)

    def mapped(
        self, name: str, view: tuple[Shape, Shape, int] | None = None
    ) -> torch.Tensor | None:
        from streamload.sources.mapped_file import MappedFile, whole

        spec = self.catalog[name]
        if spec.file not in self._maps:
            file = self._files[spec.file]
            if not isinstance(file, OpenFile):
                return None
            self._maps[spec.file] = MappedFile(file)
        return self._maps[spec.file].tensor(spec, *(view or whole(spec)))

    def reason_to_read(self) -> str:
        kinds: dict[int, str] = {}
        for file in self._files.values():
            if reason := file.reason_to_read(kinds):
                return printable(reason)
        return ""

    def allow_touching(self) -> None:
        """The files count as unchanged if only their ctime is another."""
        for file in self._files.values():
            if isinstance(file, OpenFile):
                file.allow_touching()

    def received(self) -> tuple[int, int]:
        remote = (file for file in self._files.values() if isinstance(file, RemoteFile))
        sites = {file.site for file in remote if file.site is not None}
        return sum(site.received_bytes for site in sites), sum(site.answers for site in sites)

    def interrupt(self) -> None:
        for file in self._files.values():
            file.interrupt()

    def check_unchanged(self) -> None:
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        self._maps.clear()
        for file in self._files.values():
            file.close()


def read_each(
    paths: Iterable[str], read: Callable[[ReadableFile], _T], opened: ExitStack, *, given: str
) -> list[_T]:
    """What ``read`` finds in each file; the files are ``opened``'s from then on.

    Args:
        paths: the files, in order.
        read: reads the header of one open file.
        opened: closes the files unless its owner takes them over.
        given: the path the user gave, for messages.

    Raises:
        CheckpointError: files cannot be used; all of them are listed.
    """
    headers: list[_T] = []
    faults: list[CheckpointError] = []
    files = list(paths)
    for path in files:
        try:
            headers.append(read(opened.enter_context(open_file(path))))
        except CheckpointError as error:
            if why := too_many_open(error.__cause__):  # said once, not for each file that is left
                text = f"its {plural(len(files), 'file')} cannot be opened: {why}"
                raise CheckpointError(text, path=given) from error
            faults.append(error)
    if len(faults) == 1:
        raise faults.pop()  # kept in here, it would keep this frame alive
    if faults:
        shown = listed(faults, 20, separator="; ", more="; and {left} more")
        raise CheckpointError(
            f"{len(faults)} files cannot be used: {shown}",
            path=given,
            problems=tuple(problem for fault in faults for problem in fault.problems),
        ) from faults[0]
    return headers


def join_files(
    files: Iterable[tuple[str, Mapping[str, _T]]], *, given: str, owners: Mapping[str, str]
) -> tuple[dict[str, _T], tuple[str, ...]]:
    """The tensors of all files of one checkpoint by name, in the files' order, and notices.

    Args:
        files: each file's path, and what is in it by name.
        given: the path the user gave, for messages.
        owners: the file of each name, as an index says; where several files hold a name, the copy
            in that one is taken.

    Raises:
        CheckpointError: two files hold a name, and no index says which is meant; lists every one.
    """
    parts = list(files)
    first: dict[str, str] = {}
    repeats: dict[str, list[str]] = {}
    for path, tensors in parts:
        for name in [name for name in tensors if name in first]:
            repeats.setdefault(name, [first[name]]).append(path)
        first = dict.fromkeys(tensors, path) | first
    shown = {n: f"duplicate key {n!r}: it is in {' and in '.join(repeats[n])}" for n in repeats}
    chosen = {name: owners[name] for name in repeats if owners.get(name) in repeats[name]}
    open_ones = {name: text for name, text in shown.items() if name not in chosen}
    refuse(open_ones.values(), most=3, path=given, tensor=next(iter(open_ones), None))
    lines = [f"{shown[n]}; taken from {chosen[n]}, as the index says" for n in chosen]
    found: dict[str, _T] = {}
    for path, tensors in parts:
        others = {name for name in repeats if chosen[name] != path}
        found |= {n: tensors[n] for n in tensors if n not in others} if others else tensors
    more = "; and {left} more duplicate keys"
    notice = printable(listed(lines, 3, separator="; ", more=more))
    return found, (notice,) if lines else ()
