"""Safetensors: one file, or several under an index.

Extents come from our own strict header reader, single tensors from safetensors' ``safe_open``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamload.core.errors import CheckpointError, ReadError
from streamload.core.specs import Catalog, TensorSpec
from streamload.sources.block_source import BlockSource
from streamload.sources.files import OpenFile
from streamload.sources.safetensors.header import read_header

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsSource", "open_safetensors"]


def open_safetensors(paths: Sequence[str], *, given: str) -> SafetensorsSource:
    """Open all of ``paths`` as one checkpoint; every file at fault is listed.

    Args:
        paths: the files, in order.
        given: the path the user gave, for messages.

    Raises:
        CheckpointError: a file is damaged, or a tensor is in two files.
    """
    files: list[OpenFile] = []
    catalogs: list[Catalog] = []
    faults: list[CheckpointError] = []
    for path in paths:
        try:
            file = OpenFile(path)
            files.append(file)
            catalogs.append(read_header(file))
        except CheckpointError as error:
            faults.append(error)
    if faults:
        for file in files:
            file.close()
        if len(faults) == 1:
            raise faults[0]
        raise CheckpointError(
            "; ".join(map(str, faults)),
            path=given,
            problems=tuple(p for fault in faults for p in fault.problems),
        ) from faults[0]
    source = SafetensorsSource(given, files, catalogs)
    source.refuse_repeats()
    return source


class SafetensorsSource(BlockSource):
    """A safetensors checkpoint of one or more files."""

    def __init__(self, path: str, files: Sequence[OpenFile], catalogs: Sequence[Catalog]) -> None:
        super().__init__(path, files)
        tensors: dict[str, TensorSpec] = {}
        metadata: dict[str, str] = {}
        self._repeats: list[tuple[str, str, str]] = []
        for catalog in catalogs:
            for name, spec in catalog.tensors.items():
                if name in tensors:
                    self._repeats.append((name, tensors[name].file, spec.file))
                tensors[name] = spec
            metadata = {**catalog.metadata, **metadata}
        self.catalog = Catalog(tensors, metadata)
        self._readers: dict[str, Any] = {}

    def refuse_repeats(self) -> None:
        """Raise CheckpointError (and close) if a tensor is in two files."""
        if not self._repeats:
            return
        self.close()
        lines = [f"tensor {n!r} is both in {a} and in {b}" for n, a, b in self._repeats]
        raise CheckpointError(
            "; ".join(lines[:3]), path=self.path, tensor=self._repeats[0][0], problems=tuple(lines)
        )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor's values through ``safe_open``, in memory of their own."""
        from safetensors import SafetensorError

        from streamload.sources.blocks import read_tensor

        spec = self.catalog[name]
        if not _is_utf8(spec.file):
            return read_tensor(self, spec)
        self._files[spec.file].check_unchanged()
        try:
            found: torch.Tensor = self._reader(spec.file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ReadError(str(error), path=spec.file, tensor=name) from error
        return found

    def _reader(self, path: str) -> Any:
        """``safe_open`` of one file, kept: it reads the whole header each time it is opened."""
        from safetensors import safe_open

        if path not in self._readers:
            # The pread backend gives aligned copies; the mapping one may hand out odd addresses
            # and dies with the file if that is cut meanwhile.
            self._readers[path] = safe_open(path, framework="pt", backend="pread")
        return self._readers[path]

    def close(self) -> None:
        """Close every file; mapped tensors stay valid."""
        self._readers.clear()
        super().close()


def _is_utf8(path: str) -> bool:
    """False for the paths that ``safe_open`` refuses."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
