"""``compressed-tensors``: floats and whole numbers of 8 bits, and packed ones of 4 and 8.

Names and formats are those of that library (its CompressionFormat): ``weight`` or
``weight_packed`` with ``weight_scale``, ``weight_zero_point``, ``weight_global_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamload.core.specs import TensorSpec
from streamload.decoding.quantized.fp8 import FLOATS, ignore
from streamload.decoding.quantized.grids import GridError, pair, scaled, size
from streamload.decoding.quantized.records import Found

_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)


@dataclass(frozen=True)
class _Scheme:
    """How the weights of one group of layers are quantised; a scale has ``blocks`` of numbers."""

    bits: int
    blocks: tuple[tuple[int, int], ...]


def find(found: Found) -> None:
    """Pair each weight with what belongs to it."""
    config = found.config
    sparse = config.get("sparsity_config")
    formats = [config.get("format"), sparse.get("format") if isinstance(sparse, Mapping) else None]
    groups = config.get("config_groups")
    groups = [g for g in groups.values() if _is_map(g)] if isinstance(groups, Mapping) else []
    for name in [*formats, *(group.get("format") for group in groups)]:
        if name is not None and name not in _FORMATS:
            raise GridError(f"format {name!r:.60} is not decoded")
    schemes = [_scheme(g["weights"]) for g in groups if _is_map(g.get("weights"))]
    for name, spec in found.stored.items():
        try:
            values = _values(found, name, spec, schemes)
        except GridError as error:
            found.problems.append(str(error))
            continue
        if values is not None:
            found.keep(values)
            found.used.add(f"{values.name}_shape")
    found.used &= found.stored.keys()
    found.refuse_leftovers((".weight_packed", ".weight_global_scale", ".weight_g_idx"))
    ignore(found)


def _is_map(found: object) -> bool:
    return isinstance(found, Mapping)


def _scheme(weights: Mapping[str, Any]) -> _Scheme:
    bits = size(weights.get("num_bits", 8), "num_bits")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    # Older files leave the strategy open where a size of groups says it.
    if strategy in ("group", "tensor_group") or (strategy is None and group not in (None, -1)):
        return _Scheme(bits, ((1, size(group, "group_size")),))
    if strategy == "block":
        return _Scheme(bits, tuple(pair(weights.get("block_structure"), "block_structure")))
    return _Scheme(bits, ())


def _values(found: Found, name: str, spec: TensorSpec, schemes: list[_Scheme]) -> TensorSpec | None:
    """The values that the stored tensor holds the numbers of; None if it holds none."""
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and spec.dtype in (*FLOATS, "I8"):
        scales = found.sibling(name, "weight", "weight_scale")
        zeros = found.stored.get(f"{module}.weight_zero_point") if spec.dtype == "I8" else None
        ways = _ways(schemes, (8,)) or [()]
        return _first(name, spec, scales, [(spec.dtype, way, 1) for way in ways], zeros)
    if leaf != "weight_packed":
        return None
    if f"{module}.weight_g_idx" in found.stored:
        raise GridError(f"{module + '.weight_g_idx'!r}: inputs in another order are not decoded")
    scales = found.sibling(name, "weight_packed", "weight_scale")
    target = f"{module}.weight"
    if spec.dtype == "U8":
        overall = found.stored.get(f"{module}.weight_global_scale")
        sizes = [(1, 32)] if overall is None else [(1, 16)]
        return scaled(target, spec, scales, "fp4", sizes, overall=overall, is_divisor=True)
    if spec.dtype != "I32":
        raise GridError(f"{name!r} is {spec.dtype}, not I32 or U8")
    zeros = found.stored.get(f"{module}.weight_zero_point")
    plain = {4: "int4", 8: "biased8"} if zeros is None else {4: "uint4", 8: "U8"}
    ways2 = [
        (code, way, 32 // bits) for bits, code in plain.items() for way in _ways(schemes, (bits,))
    ]
    if not ways2:
        bits = sorted({scheme.bits for scheme in schemes})
        raise GridError(f"{name!r} has numbers of {bits} bits, but only 4 and 8 are decoded")
    return _first(target, spec, scales, ways2, zeros)


def _ways(schemes: list[_Scheme], bits: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(dict.fromkeys(scheme.blocks for scheme in schemes if scheme.bits in bits))


def _first(
    name: str,
    spec: TensorSpec,
    scales: TensorSpec,
    ways: list[tuple[str, tuple[tuple[int, int], ...], int]],
    zeros: TensorSpec | None,
) -> TensorSpec:
    """The one way that shapes allow: which group a layer is in is told by patterns of its class.

    Raises:
        GridError: none fits, or several do.
    """
    fitting: dict[object, TensorSpec] = {}
    problem: GridError | None = None
    for code, blocks, each in ways:
        try:
            each = each if zeros is not None and zeros.dtype == "I32" else 1
            made = scaled(name, spec, scales, code, blocks, zeros=zeros, zeros_packed=each)
        except GridError as error:
            problem = problem or error
        else:
            fitting[made.shape, made.encoding] = made
    if len(fitting) > 1:
        raise GridError(f"{spec.name!r} fits several groups of the configuration")
    if not fitting:
        assert problem is not None, "there is one way at least"
        raise problem
    return next(iter(fitting.values()))
