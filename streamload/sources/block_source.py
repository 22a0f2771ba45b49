"""What all sources share whose bytes lie in open files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from streamload.core.specs import Extent
from streamload.sources.base import Source
from streamload.sources.config.beside import config_beside
from streamload.sources.files import OpenFile

if TYPE_CHECKING:
    import torch

    from streamload.sources.mapped_file import MappedFile

__all__ = ["BlockSource"]


class BlockSource(Source):
    """A source whose bytes lie in open files: block reads and hints by extent."""

    def __init__(self, path: str, files: Iterable[OpenFile]) -> None:
        self.path = path
        self._files = {file.path: file for file in files}
        self._maps: dict[str, MappedFile] = {}

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill ``buffer`` with the extent's bytes; see Source."""
        self._files[extent.file].read_into(extent.offset, buffer, tensor=tensor)

    def prefetch(self, extent: Extent) -> None:
        """Start reading the extent into the page cache."""
        self._files[extent.file].advise(extent.offset, extent.nbytes, needed=True)

    def release(self, extent: Extent) -> None:
        """Give the extent's cached pages back."""
        self._files[extent.file].advise(extent.offset, extent.nbytes, needed=False)

    def mapped(self, name: str) -> torch.Tensor | None:
        """The tensor as a view of its file's one mapping, or None where it cannot be."""
        from streamload.sources.mapped_file import MappedFile

        spec = self.catalog[name]
        if spec.file not in self._maps:
            self._maps[spec.file] = MappedFile(self._files[spec.file])
        return self._maps[spec.file].tensor(spec)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """What ``config.json`` or Meta's ``params.json`` beside the files says; see Source."""
        return config_beside(self.path, self.catalog)

    def check_unchanged(self) -> None:
        """Compare every file with what it was when it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close every file; mapped tensors stay valid."""
        self._maps.clear()
        for file in self._files.values():
            file.close()
