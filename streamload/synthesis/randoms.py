"""The values of made-up tensors, block by block: the same for a seed and a name on any machine."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from streamload.core.specs import numel
from streamload.synthesis.recipes import Recipe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BLOCK_ELEMENTS = 1 << 20


def blocks(recipe: Recipe, *, seed: int, dtype: str) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, at most 4 MiB at a time.

    A block is the generator's own memory, good until the next one is asked for.
    """
    for block in values(recipe, seed=seed):
        yield encode(block, recipe.dtype or dtype).data.cast("B")


def values(
    recipe: Recipe, *, seed: int, block_elements: int = _BLOCK_ELEMENTS
) -> Iterator[NDArray[np.float32]]:
    """The tensor's values as flat float32 blocks of ``block_elements``, the last one shorter.

    A block is good until the next one is asked for.
    """
    import numpy as np

    count = numel(recipe.shape)
    number = zlib.crc32((recipe.drawn_as or recipe.name).encode())
    draw = np.random.Generator(np.random.SFC64([seed, number]))
    memory = np.empty(min(count, block_elements), np.float32)
    for start in range(0, count, block_elements):
        block = memory[: min(block_elements, count - start)]
        if recipe.kind in ("normal", "norm"):
            draw.standard_normal(out=block, dtype=np.float32)
            block *= np.float32(0.02 if recipe.kind == "norm" else recipe.value)
            if recipe.kind == "norm":
                block += 1
        else:
            _fill(block, recipe, start)
        yield block


def encode(block: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The float32 values rounded to ``dtype``, little-endian, as an array of its bits.

    bfloat16 rounds to nearest even, as torch does; the values are finite.
    """
    import numpy as np

    if dtype == "bfloat16":
        bits = block.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        halves: NDArray[Any] = ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype("<u2")
        return halves
    if dtype == "bool":
        flags: NDArray[Any] = (block != 0).view(np.uint8)
        return flags
    with np.errstate(over="ignore"):  # a mask's -1e9 is minus infinity in half precision
        rounded: NDArray[Any] = block.astype(
            {"float16": "<f2", "float32": "<f4"}[dtype], copy=False
        )
    return rounded


def _fill(block: NDArray[np.float32], recipe: Recipe, start: int) -> None:
    import numpy as np

    index = np.arange(start, start + block.size)
    if recipe.kind == "causal_mask":
        row, column = np.divmod(index, recipe.shape[-1])
        block[:] = column <= row % recipe.shape[-2]
    elif recipe.kind == "inv_freq":
        block[:] = recipe.value ** -(index / recipe.shape[-1])
    else:
        block[:] = recipe.value
