"""A base checkpoint with adapters merged into it: their tensors stand in its catalog as merged."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from streamload.adapters.merge import Merge
from streamload.adapters.settings import AdapterSettings, settings_from_config
from streamload.adapters.work_out import work_out
from streamload.core.errors import CheckpointError, CheckpointNotFoundError, refuse
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.core.wording import listed, plural, printable
from streamload.sources.base import Source
from streamload.sources.config.beside import ADAPTER_CONFIG
from streamload.sources.detect import open_checkpoint
from streamload.sources.folders import LOCAL_FILE
from streamload.sources.hub import folder_of, is_hub_name
from streamload.sources.remote.urls import is_url
from streamload.sources.small_files import read_object
from streamload.sources.wrapping.wrapping_source import WrappingSource

if TYPE_CHECKING:
    import torch

_FILES = ("adapter_model.safetensors", "adapter_model.bin")


@contextmanager
def with_adapters(source: Source, adapters: Sequence[str]) -> Iterator[Source]:
    """The source, with adapters merged into its tensors one after the other; closes their files.

    Args:
        source: the open base, decoded where it is quantised; the caller closes it.
        adapters: a folder with ``adapter_config.json``, or the file of tensors beside one, each.

    Raises:
        CheckpointError: an adapter is damaged, of another kind, or for another base.
    """
    with ExitStack() as opened:
        for path in adapters:
            adapter, settings = _open(path)
            opened.enter_context(adapter)
            merge = _worked_out(path, source, adapter, settings)
            source = _MergedSource(source, adapter, merge)
        yield source


def _open(path: str) -> tuple[Source, AdapterSettings]:
    """An adapter's tensors and its settings."""
    if is_url(path):
        raise CheckpointNotFoundError(
            "adapters are read on this machine only: copy its folder here first", path=path
        )
    if not (is_hub_name(path) or os.path.exists(path)):
        raise CheckpointNotFoundError("no such folder or file", path=path)
    folder = folder_of(path)
    config = os.path.join(folder, ADAPTER_CONFIG)
    try:
        settings = settings_from_config(read_object(config), config)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"no adapter: there is no {ADAPTER_CONFIG} in {printable(folder)}", path=path
        ) from error
    if os.path.isfile(path):
        return open_checkpoint(path), settings
    for name in _FILES:
        if os.path.isfile(file := os.path.join(folder, name)):
            return open_checkpoint(file), settings
    raise CheckpointNotFoundError(f"no adapter: neither {' nor '.join(_FILES)}", path=path)


def _worked_out(path: str, source: Source, adapter: Source, settings: AdapterSettings) -> Merge:
    try:
        config, _ = source.config()
    except CheckpointError:
        config = None  # which whoever needs it says
    merge = work_out(printable(path), settings, adapter.catalog, source.catalog, config or {})
    if merge.problems and all("for no tensor of the base" in text for text in merge.problems):
        is_local = any(os.path.basename(file) == LOCAL_FILE for file in source.files)
        text = (
            "has streamload's local names, which no adapter knows: streamload convert (--names "
            "published) gives it the published ones"
            if is_local
            else "is another base than that of this adapter"
        )
        merge.problems.insert(0, f"{printable(source.path)} {text}")
    refuse(merge.problems, path=adapter.path)
    if not merge.made:
        raise CheckpointError("holds no tensors: nothing would be merged", path=adapter.path)
    return merge


class _MergedSource(WrappingSource):
    """A source some of whose tensors an adapter has a part in.

    Args:
        inner: the base, which is closed by whoever opened it, as is the adapter.
        merge: what is merged.
    """

    def __init__(self, inner: Source, adapter: Source, merge: Merge) -> None:
        super().__init__(inner, merge.made.values())
        told = listed(f"{plural(n, 'tensor')} {words}" for words, n in merge.counts.items())
        notices = (f"adapter {merge.label} merged: {told}", *merge.notices)
        catalog = self.catalog
        self.catalog = Catalog(
            catalog.tensors,
            catalog.metadata,
            (*catalog.notices, *map(printable, notices)),
            catalog.problems,
        )
        self._adapter = adapter
        self._files = {spec.file for spec in adapter.catalog.values()}
        self._parts = _Parts(self, merge)

    def below(self, name: str) -> Source:
        return self._parts if name in self.own else self.inner.below(name)

    def of(self, extent: Extent) -> Source:
        """Whose bytes they are."""
        return self._adapter if extent.file in self._files else self.inner

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        self.of(extent).read_into(extent, buffer, tensor=tensor)

    def read_rows(
        self, first: Extent, stride_bytes: int, buffer: memoryview, *, tensor: str | None = None
    ) -> None:
        self.of(first).read_rows(first, stride_bytes, buffer, tensor=tensor)

    def prefetch(self, extent: Extent) -> None:
        self.of(extent).prefetch(extent)

    def release(self, extent: Extent) -> None:
        # An adapter's tensor is read again for each block of rows.
        if self.of(extent) is self.inner:
            self.inner.release(extent)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()
        self._adapter.check_unchanged()

    def from_adapter(self, name: str) -> torch.Tensor:
        return self._adapter.tensor(name)

    def held_by_adapter(self, name: str) -> torch.Tensor | None:
        return self._adapter.held(name)


class _Parts(WrappingSource):
    """Where the parts of merged tensors are read: in the base, in the adapter, or made of both."""

    def __init__(self, merged: _MergedSource, merge: Merge) -> None:
        super().__init__(merged.inner, ())
        self._merged = merged
        self._names = merge.parts
        self._steps, self._norms = merge.steps, merge.norms
        self._known_norms: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def below(self, name: str) -> Source:
        return self if name in self._steps else self.inner.below(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._names:
            return self._merged.from_adapter(self._names[name])
        if name not in self._norms:
            return self.inner.tensor(name)
        with self._lock:
            if name not in self._known_norms:
                self._known_norms[name] = self._column_norms(self._norms[name])
            return self._known_norms[name]

    def held(self, name: str) -> torch.Tensor | None:
        if name in self._names:
            return self._merged.held_by_adapter(self._names[name])
        return None if name in self._norms else self.inner.held(name)

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        known = tensor and self._names.get(tensor, tensor)
        self._merged.read_into(extent, buffer, tensor=known)

    def read_rows(
        self, first: Extent, stride_bytes: int, buffer: memoryview, *, tensor: str | None = None
    ) -> None:
        known = tensor and self._names.get(tensor, tensor)
        self._merged.read_rows(first, stride_bytes, buffer, tensor=known)

    def _column_norms(self, spec: TensorSpec) -> torch.Tensor:
        from streamload.decoding.low_rank import LowRank
        from streamload.decoding.values.low_rank import column_norms
        from streamload.sources.blocks import bytes_of, torch_dtype
        from streamload.sources.wrapping.reader import Reader

        assert isinstance(spec.encoding, LowRank), "norms are of merged matrices"
        read = Reader(self._merged, spec)

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            read(start, stop, bytes_of(out))

        rows, columns = spec.encoding.rows, spec.encoding.columns
        return column_norms(fill, rows, columns, torch_dtype(spec.dtype))
