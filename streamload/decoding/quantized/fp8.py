"""``fp8`` and its kin: 8-bit floats with scales, and 4-bit ones packed in bytes beside them.

The names are those of published checkpoints: DeepSeek-V3's ``weight_scale_inv`` (which is what a
number is multiplied by, whatever it is called), DeepSeek-V4's ``scale``, Mistral's
``qscale_weight``, ``weight_scale`` of others, and ModelOpt's ``weight_scale_2``.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamload.decoding.quantized.grids import GridError, pair, scaled
from streamload.decoding.quantized.records import Found

FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# Scales of what a layer is given, and of the key and value cache: they say nothing of weights.
_ACTIVATIONS = (
    *("input_scale", "input_scale_ub", "activation_scale", "qscale_act", "input_zero_point"),
    *("input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale"),
)


def find(found: Found) -> None:
    """Pair each weight with its scale."""
    blocks = pair(found.config.get("weight_block_size"), "weight_block_size")
    if found.method == "mxfp8":
        blocks = blocks or [(1, 32)]
    for name, spec in found.stored.items():
        if name.endswith(".pre_quant_scale"):  # ModelOpt's AWQ: inputs are scaled as well
            found.problems.append(f"{name!r}: scales of a layer's inputs are not undone")
        is_packed = spec.dtype in ("I8", "U8")
        if (spec.dtype not in FLOATS and not is_packed) or is_ignored(name):
            continue
        if name.endswith(("scale", "scale_inv", "scale_2")):  # NVFP4's scales are FP8 themselves
            continue
        scales = [found.stored[n] for n in _scales_of(name) if n in found.stored]
        if not scales and is_packed:
            continue
        if len(scales) != 1:
            have = " and ".join(repr(s.name) for s in scales) or "none"
            found.problems.append(f"{name!r} is {spec.dtype} and needs one scale, but has {have}")
            continue
        overall = found.stored.get(f"{name}_scale_2")
        try:
            if not is_packed:
                found.keep(scaled(name, spec, scales[0], spec.dtype, blocks, overall=overall))
            else:
                sizes = [(1, 16)] if overall is not None else [(1, 32), *blocks]
                found.keep(scaled(name, spec, scales[0], "fp4", sizes, overall=overall))
        except GridError as error:
            found.problems.append(str(error))
    ignore(found)


def ignore(found: Found) -> None:
    """Scales of activations are none of a weight's."""
    found.ignored.update(filter(is_ignored, found.stored))


def is_ignored(name: str) -> bool:
    """True for the names of scales that are not a weight's."""
    leaf = name.rpartition(".")[2]
    return leaf in _ACTIVATIONS or leaf.endswith(("_input_scale", "_activation_scale"))


def _scales_of(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name}_scale"
    module, _, leaf = name.rpartition(".")
    if leaf == "weight":
        yield f"{module}.scale"
        yield f"{module}.qscale_weight"
