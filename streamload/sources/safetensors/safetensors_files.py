"""Safetensors: one file, or several under an index.

Extents come from our own strict header reader, single tensors from safetensors' ``safe_open``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamload.core.errors import ReadError
from streamload.core.specs import Catalog, TensorSpec
from streamload.sources.block_source import BlockSource, join_files, read_each
from streamload.sources.files import OpenFile, ReadableFile
from streamload.sources.safetensors.header import is_encodable, read_header

if TYPE_CHECKING:
    import torch

# Each has a descriptor of its own.
_MOST_READERS = 4


def open_safetensors(
    paths: Sequence[str], *, given: str, owners: Mapping[str, str] = MappingProxyType({})
) -> SafetensorsSource:
    """Open all of ``paths`` as one checkpoint; every file at fault is listed.

    Args:
        paths: the files, in order.
        given: the path the user gave, for messages.
        owners: the file of each tensor, as the index says.

    Raises:
        CheckpointError: a file is damaged, or a tensor is in two files and in none by the index.
    """
    with ExitStack() as opened:
        parts = read_each(paths, lambda file: (file, read_header(file)), opened, given=given)
        files = ((file.path, catalog) for file, catalog in parts)
        tensors, notices = join_files(files, given=given, owners=owners)
        opened.pop_all()
    # Where files differ, the first one's entry stands.
    metadata = {key: text for _, part in parts[::-1] for key, text in part.metadata.items()}
    return SafetensorsSource(
        given, [file for file, _ in parts], Catalog(tensors, metadata, notices)
    )


class SafetensorsSource(BlockSource):
    """A safetensors checkpoint of one or more files."""

    def __init__(self, path: str, files: Sequence[ReadableFile], catalog: Catalog) -> None:
        super().__init__(path, files)
        self.catalog = catalog
        self._readers: dict[str, Any] = {}

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        spec = self.catalog[name]
        file = self._files[spec.file]
        if not isinstance(file, OpenFile) or not is_encodable(spec.file):
            return self._read(spec)  # ``safe_open`` refuses such paths
        file.check_unchanged()
        try:
            values: torch.Tensor = self._reader(spec.file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ReadError(str(error), path=spec.file, tensor=name) from error
        return values

    def _read(self, spec: TensorSpec) -> torch.Tensor:
        import torch

        from streamload.sources.blocks import bytes_of, torch_dtype

        assert spec.extent is not None
        values = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        self.read_into(spec.extent, bytes_of(values), tensor=spec.name)
        return values

    def _reader(self, path: str) -> Any:
        """``safe_open`` of one file, kept: it reads the whole header each time it is opened."""
        from safetensors import safe_open

        if path not in self._readers:
            if len(self._readers) >= _MOST_READERS:
                self._readers.pop(next(iter(self._readers)))
            # The pread backend gives aligned copies; the mapping one may hand out odd addresses
            # and dies with the file if that is cut meanwhile.
            self._readers[path] = safe_open(path, framework="pt", backend="pread")
        return self._readers[path]

    def close(self) -> None:
        self._readers.clear()
        super().close()
