"""What a made-up checkpoint consists of: names, shapes, how each tensor's values are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamload.core.dtypes import BY_TORCH_NAME, nbytes_of
from streamload.core.specs import Shape

Kind = Literal["normal", "norm", "causal_mask", "constant", "inv_freq"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tensor to write.

    Attributes:
        name: the stored name.
        shape: as stored.
        kind: ``"normal"`` with standard deviation ``value``; ``"norm"``, which is 1 plus such
            noise; ``"causal_mask"``, ones on and below the diagonal of the last two dimensions;
            ``"constant"``, all ``value``; ``"inv_freq"``, ``value ** -(i / n)`` for i < n.
        value: see ``kind``.
        dtype: torch's name of the element type; None takes the checkpoint's.
        drawn_as: the name whose random numbers are used: two recipes with one name are equal.
    """

    name: str
    shape: Shape
    kind: Kind = "normal"
    value: float = 0.02
    dtype: str | None = None
    drawn_as: str | None = None

    def nbytes(self, dtype: str) -> int:
        """Bytes on disk in a checkpoint of element type ``dtype``."""
        size = nbytes_of(BY_TORCH_NAME[self.dtype or dtype], self.shape)
        assert size is not None
        return size


@dataclass(frozen=True, slots=True)
class Preset:
    """A known checkpoint.

    Attributes:
        config: the content of config.json.
        dtype: the published element type.
        shard_bytes: the published shard size, None for one file.
        block_order: a block's parts, under their local names, in file order.
        buffers: from the config to the masks and the like that each block's attention begins
            with; their names are templates with ``{layer}``.
        repeats_head: a tied head is stored a second time.
    """

    config: Mapping[str, Any]
    dtype: str
    shard_bytes: int | None = None
    block_order: tuple[str, ...] = ("ln1", "attn", "ln2", "mlp")
    buffers: Callable[[Mapping[str, Any]], Iterable[Recipe]] | None = None
    repeats_head: bool = False

    def recipes(self, config: Mapping[str, Any], masks: bool) -> Iterator[Recipe]:
        """The tensors of such a checkpoint, in file order; with the buffers if ``masks``."""
        from streamload.synthesis.from_table import recipes_of

        return recipes_of(self, config, masks)
