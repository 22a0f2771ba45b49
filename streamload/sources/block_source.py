"""What all sources share whose bytes lie in open files, and how such files are opened together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from streamload.core.errors import CheckpointError, refuse
from streamload.core.specs import Extent, Shape, TensorSpec
from streamload.core.wording import listed
from streamload.sources.base import Source
from streamload.sources.config.beside import config_beside
from streamload.sources.files import OpenFile

if TYPE_CHECKING:
    import torch

    from streamload.sources.mapped_file import MappedFile

_T = TypeVar("_T")


class BlockSource(Source):
    """A source whose bytes lie in open files: block reads and hints by extent."""

    def __init__(self, path: str, files: Iterable[OpenFile]) -> None:
        self.path = path
        self._files = {file.path: file for file in files}
        self._maps: dict[str, MappedFile] = {}

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        self._files[extent.file].read_into(extent.offset, buffer, tensor=tensor)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        return config_beside(self.path, self.catalog)

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
            self._maps[spec.file] = MappedFile(self._files[spec.file])
        return self._maps[spec.file].tensor(spec, *(view or whole(spec)))

    def check_unchanged(self) -> None:
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        self._maps.clear()
        for file in self._files.values():
            file.close()


def read_each(
    paths: Iterable[str], read: Callable[[OpenFile], _T], opened: ExitStack, *, given: str
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
    for path in paths:
        try:
            headers.append(read(opened.enter_context(OpenFile(path))))
        except CheckpointError as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        shown = listed(faults, 20, separator="; ", more="; and {left} more")
        raise CheckpointError(
            f"{len(faults)} files cannot be used: {shown}",
            path=given,
            problems=tuple(problem for fault in faults for problem in fault.problems),
        ) from faults[0]
    return headers


def refuse_repeats(files: Sequence[Mapping[str, TensorSpec]], *, given: str) -> None:
    """Refuse files of one checkpoint of which two have a tensor of the same name.

    Raises:
        CheckpointError: lists every such tensor.
    """
    first: dict[str, TensorSpec] = {}
    repeats = {
        name: f"tensor {name!r} is both in {first[name].file} and in {spec.file}"
        for specs in files
        for name, spec in specs.items()
        if first.setdefault(name, spec) is not spec
    }
    refuse(repeats.values(), most=3, path=given, tensor=next(iter(repeats), None))
