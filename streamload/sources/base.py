"""What a source is: where tensors are, and how their bytes are read. Knows nothing of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamload.core.display.cards import Card, Shown
from streamload.core.display.stored import catalog_card
from streamload.core.specs import Catalog, Extent, Shape
from streamload.core.wording import without_secrets

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from streamload.sources.torch.plain_objects import StoredObject


class Source(Shown, ABC):
    """A readable checkpoint: one file or many. What is not abstract suits tensors in memory.

    Attributes:
        path: as the user gave it, for messages.
        catalog: every stored tensor; made from headers alone.
        is_replaced_whole: what writes such files puts a new one in place of the old. Else whoever
            saves a model that is mapped from its own file destroys both.
        is_remote: its bytes come over a network; nothing of it can be mapped.
        buffer_bytes: what it may hold of bytes that were not asked for yet.
        objects: extra states that are no tensors, by stored name.
        versions: what a saved state dict notes of each module (``version`` and more), by the
            module's path.
        default_dtype: safetensors name of the dtype that a new module gets where nobody asks for
            one; ``""`` where each tensor keeps its own.
        companions: names of the small files that it holds inside (``tokenizer.json``), which
            with other formats lie beside.

    Contract (each source passes ``tests/sources/conformance.py``):
        ``read_into`` is thread safe, fills the whole buffer or raises ReadError, and never moves
        a shared file offset. Nothing is kept of the buffer after it returns.
    """

    path: str
    catalog: Catalog
    is_replaced_whole = True
    is_remote = False
    buffer_bytes = 0
    objects: Mapping[str, StoredObject] = MappingProxyType({})
    versions: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    default_dtype: str = ""
    companions: tuple[str, ...] = ()

    def _card(self) -> Card:
        kind, catalog = type(self).__name__, getattr(self, "catalog", None)
        if catalog is None:  # shown while it is being made, by a debugger
            return Card(kind)
        return catalog_card(
            catalog,
            f"{kind} {without_secrets(self.path)}",
            (("files", str(len(self.files))),),
            "more: .catalog, .metadata, .tensor(name), .config(); close() it, or use with",
        )

    @property
    def files(self) -> Collection[str]:
        """The files that its tensors lie in."""
        return {spec.file for spec in self.catalog.tensors.values()}

    @abstractmethod
    def read_into(self, extent: Extent, buffer: memoryview, *, tensor: str | None = None) -> None:
        """Fill ``buffer`` (``extent.nbytes`` writable bytes) with the extent's bytes."""

    def read_rows(
        self, first: Extent, stride_bytes: int, buffer: memoryview, *, tensor: str | None = None
    ) -> None:
        """Fill ``buffer`` with whole rows of a file, end to end; as ``read_into`` otherwise.

        Args:
            first: the first row; all are of its length.
            stride_bytes: from the beginning of one row to that of the next.
            buffer: as long as a whole number of rows; the caller's throughout.
            tensor: whose rows these are, for messages.
        """
        size, offset = first.nbytes, first.offset
        for at in range(0, buffer.nbytes, size):
            self.read_into(Extent(first.file, offset, size), buffer[at : at + size], tensor=tensor)
            offset += stride_bytes

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor's values in memory of their own, stored dtype and shape, contiguous."""

    @property
    def metadata(self) -> dict[str, str]:
        """The file's own string-to-string map."""
        return dict(self.catalog.metadata)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """What the checkpoint says of its model, as in ``config.json``, and notices about it.

        Raises:
            CheckpointError: there is a configuration, and it cannot be used.
        """
        return None, ()

    def adapter(self) -> dict[str, Any] | None:
        """What lies beside the checkpoint as ``adapter_config.json``, if anything does."""
        return None

    def companion(self, name: str) -> bytes:
        """One of ``companions``.

        Raises:
            CheckpointError: what it is made of cannot be used.
        """
        raise KeyError(name)

    def prefetch(self, extent: Extent) -> None:  # only a hint
        """Hint that the extent is read soon."""

    def release(self, extent: Extent) -> None:  # only a hint
        """Hint that the extent is not read again: its cached pages may go."""

    def mapped(
        self, name: str, view: tuple[Shape, Shape, int] | None = None
    ) -> torch.Tensor | None:
        """The tensor as a view of the mapped file, or None if it cannot be (alignment, kind).

        Args:
            name: the stored name.
            view: shape, strides and offset, in the tensor's elements; None for all of it.

        Returns:
            A tensor with a storage of its own range of the file.
        """
        del name, view
        return None

    def reason_to_read(self) -> str:
        """Why its tensors are better read than mapped, in words; ``""`` if nothing is known."""
        return ""

    def held(self, name: str) -> torch.Tensor | None:
        """The tensor's elements in memory order, flat, if they are in host memory already."""
        del name
        return None

    def below(self, name: str) -> Source:
        """Where the parts of an encoded tensor are read; not the same if both have one name."""
        del name
        return self

    def check_unchanged(self) -> None:  # memory does not change by itself
        """Raise ReadError if any file was cut, written or replaced since it was opened."""

    def received(self) -> tuple[int, int]:
        """Bytes that came over a network so far, and in how many answers."""
        return 0, 0

    def interrupt(self) -> None:  # disks and memory answer soon
        """Have reads that wait for a server fail now; the source is of no more use then."""

    def close(self) -> None:  # memory needs no closing
        """Close all files; mapped tensors stay valid. Closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
