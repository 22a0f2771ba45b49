"""``quant_method: fp8``: 8-bit floats with scales, and 4-bit ones packed in int8 beside them.

The names are those of published checkpoints: DeepSeek-V3's ``weight_scale_inv`` (which is what a
number is multiplied by, whatever it is called), DeepSeek-V4's ``scale``, Mistral's
``qscale_weight``, and ``weight_scale`` of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamload.core.specs import TensorSpec
from streamload.decoding.quantized.grids import GridError, scaled
from streamload.decoding.quantized.records import Found

# Of a weight's module; the first of a pair ends as its weight does not.
_OF_MODULE = ("scale", "qscale_weight")
# Scales of what a layer is given, and of the key and value cache: they say nothing of weights.
ACTIVATIONS = ("input_scale", "activation_scale", "qscale_act", "k_scale", "v_scale", "q_scale")
_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


def find(found: Found) -> None:
    """Pair each weight with its scale."""
    blocks = _block_sizes(found.config)
    for name, spec in found.stored.items():
        is_packed = spec.dtype == "I8"
        if spec.dtype not in _FLOATS and not is_packed:
            continue
        scales = [found.stored[n] for n in _scales_of(name) if n in found.stored]
        if not scales and is_packed:
            continue
        if len(scales) != 1:
            have = " and ".join(repr(s.name) for s in scales) or "none"
            found.problems.append(f"{name!r} is {spec.dtype} and needs one scale, but has {have}")
            continue
        try:
            refuse_type(scales[0])
            code, sizes = ("fp4", [(1, 32), *blocks]) if is_packed else (spec.dtype, blocks)
            found.keep(scaled(name, spec, scales[0], code, sizes))
        except GridError as error:
            found.problems.append(str(error))
    ignore(found)


def ignore(found: Found) -> None:
    """Scales of activations are none of a weight's."""
    endings = tuple(f".{leaf}" for leaf in ACTIVATIONS)
    more = tuple(f"_{leaf}" for leaf in ("input_scale", "activation_scale"))
    found.used.update(name for name in found.stored if name.endswith((*endings, *more)))


def refuse_type(scales: TensorSpec) -> None:
    """Raise GridError for scales that are no numbers to multiply by."""
    if scales.dtype not in SCALES:
        raise GridError(f"{scales.name!r} is {scales.dtype}, which a scale cannot be")


def _scales_of(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name}_scale"
    module, _, leaf = name.rpartition(".")
    if leaf == "weight":
        yield from (f"{module}.{scale}" for scale in _OF_MODULE)


def _block_sizes(config: Any) -> list[tuple[int, int]]:
    """The configured size of blocks; none where scales are for whole tensors or rows.

    Raises:
        GridError: it is no pair of whole numbers.
    """
    found = config.get("weight_block_size")
    if found is None:
        return []
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 2
        or any(type(n) is not int or n < 1 for n in found)
    ):
        raise GridError(f"weight_block_size must be two whole numbers, not {found!r}")
    return [(found[0], found[1])]
