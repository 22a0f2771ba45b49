"""What a source is: where tensors are, and how their bytes are read. Knows nothing of models."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from streamload.core.specs import Catalog, Extent

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["Source", "SourceBase"]


@runtime_checkable
class Source(Protocol):
    """A readable checkpoint: one file or many.

    Attributes:
        path: as the user gave it, for messages.
        catalog: every stored tensor; made from headers alone.
        metadata: the file's own string-to-string map.

    Contract (each source passes ``tests/sources/conformance.py``):
        ``read_into`` is thread safe, fills the whole buffer or raises ReadError, and never moves
        a shared file offset. Nothing is kept of the buffer after it returns.
    """

    path: str
    catalog: Catalog

    @property
    def metadata(self) -> dict[str, str]:
        """The file's own string-to-string map."""

    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill ``buffer`` (``extent.nbytes`` writable bytes) with the extent's bytes."""

    def prefetch(self, extent: Extent) -> None:
        """Hint that the extent is read soon."""

    def release(self, extent: Extent) -> None:
        """Hint that the extent is not read again: its cached pages may go."""

    def mapped(self, name: str) -> torch.Tensor | None:
        """The tensor as a view of the mapped file, or None if it cannot be (alignment, kind)."""

    def held(self, name: str) -> torch.Tensor | None:
        """The tensor's elements in memory order, flat, if they are in host memory already."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor's values in memory of their own, stored dtype and shape, contiguous."""

    def check_unchanged(self) -> None:
        """Raise ReadError if any file was cut, written or replaced since it was opened."""

    def close(self) -> None:
        """Close all files; mapped tensors stay valid. Closing twice is allowed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SourceBase:
    """The parts of a source that most kinds share: context manager, hints that do nothing."""

    path: str
    catalog: Catalog

    @property
    def metadata(self) -> dict[str, str]:
        """The file's own string-to-string map."""
        return dict(self.catalog.metadata)

    def prefetch(self, extent: Extent) -> None:
        """No hint to give."""

    def release(self, extent: Extent) -> None:
        """No hint to give."""

    def mapped(self, name: str) -> torch.Tensor | None:
        """Nothing is mapped."""
        del name
        return None

    def held(self, name: str) -> torch.Tensor | None:
        """Nothing is in memory."""
        del name
        return None

    def check_unchanged(self) -> None:
        """Nothing can change."""

    def close(self) -> None:
        """Nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
