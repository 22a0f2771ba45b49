"""A source around another: what both have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamload.core.specs import Extent, Shape, TensorSpec
from streamload.sources.base import Source

if TYPE_CHECKING:
    import torch


class WrappingSource(Source):
    """A source with tensors of its own over those of another, which it closes.

    Args:
        inner: answers for all tensors but its own.
        own: the tensors that this source makes; each takes the place of an inner one of its name.
        hidden: names of inner tensors that are not in the catalog.
    """

    def __init__(
        self, inner: Source, own: Iterable[TensorSpec], hidden: Collection[str] = ()
    ) -> None:
        self.path = inner.path
        self.is_replaced_whole = inner.is_replaced_whole
        self.objects, self.versions = inner.objects, inner.versions
        self.default_dtype, self.companions = inner.default_dtype, inner.companions
        self.is_remote, self.buffer_bytes = inner.is_remote, inner.buffer_bytes
        self.inner = inner
        self.own = {spec.name: spec for spec in own}
        kept = {name: spec for name, spec in inner.catalog.items() if name not in hidden}
        self.catalog = replace(inner.catalog, tensors={**kept, **self.own})

    @property
    def files(self) -> Collection[str]:
        return self.inner.files

    def below(self, name: str) -> Source:
        return self.inner if name in self.own else self.inner.below(name)

    def tensor(self, name: str) -> torch.Tensor:
        from streamload.sources.wrapping.reader import values_of

        return values_of(self, self.own[name]) if name in self.own else self.inner.tensor(name)

    def held(self, name: str) -> torch.Tensor | None:
        return None if name in self.own else self.inner.held(name)

    def mapped(
        self, name: str, view: tuple[Shape, Shape, int] | None = None
    ) -> torch.Tensor | None:
        return None if name in self.own else self.inner.mapped(name, view)

    def reason_to_read(self) -> str:
        return self.inner.reason_to_read()

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        self.inner.read_into(extent, buffer, tensor=tensor)

    def read_rows(
        self, first: Extent, stride_bytes: int, buffer: memoryview, *, tensor: str | None = None
    ) -> None:
        self.inner.read_rows(first, stride_bytes, buffer, tensor=tensor)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        return self.inner.config()

    def adapter(self) -> dict[str, Any] | None:
        return self.inner.adapter()

    def companion(self, name: str) -> bytes:
        return self.inner.companion(name)

    def prefetch(self, extent: Extent) -> None:
        self.inner.prefetch(extent)

    def release(self, extent: Extent) -> None:
        self.inner.release(extent)

    def received(self) -> tuple[int, int]:
        return self.inner.received()

    def interrupt(self) -> None:
        self.inner.interrupt()

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()
