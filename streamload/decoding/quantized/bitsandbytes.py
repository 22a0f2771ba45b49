"""``bitsandbytes``: 4-bit numbers of a list (NF4, FP4) in flat blocks, and int8 with row scales.

The names are those of its own state dicts. Shape and block size of a 4-bit weight are only in its
``quant_state``, a few lines of JSON kept as a tensor.
"""

from __future__ import annotations

import json
from typing import Any

from streamload.core.specs import Shape, TensorSpec, numel
from streamload.decoding.quantized.grids import GridError, expect, scaled, size
from streamload.decoding.quantized.records import Found
from streamload.decoding.scaled import Scaled

_STATE = ".quant_state.bitsandbytes__"
# What the library multiplies by for 1 / 127.
_PER_127 = 7.874015718698502e-3


def find(found: Found) -> None:
    """Pair each weight with what belongs to it."""
    for name, spec in found.stored.items():
        try:
            if _STATE in name:
                weight, _, kind = name.rpartition(_STATE)
                found.keep(_four_bits(found, weight, kind, spec))
                found.used.add(name)
            elif spec.dtype == "I8" and name.endswith(".weight"):
                scales = found.sibling(name, "weight", "SCB")
                if scales.shape != spec.shape[:1] or len(spec.shape) != 2:
                    raise GridError(
                        f"{scales.name!r} has shape {list(scales.shape)}, but {name!r} of shape "
                        f"{list(spec.shape)} needs one for each row"
                    )
                found.keep(scaled(name, spec, scales, "I8", factor=_PER_127))
                found.used.add(name.removesuffix("weight") + "weight_format")
        except GridError as error:
            found.problems.append(str(error))
    found.used &= found.stored.keys()
    found.refuse_leftovers((".absmax", ".SCB"))


def _four_bits(found: Found, weight: str, kind: str, state: TensorSpec) -> TensorSpec:
    if kind not in ("nf4", "fp4"):
        raise GridError(f"{state.name!r}: numbers of kind {kind!r:.60} are not decoded")
    facts = _facts(found, state)
    shape = facts.get("shape")
    if not isinstance(shape, list) or not shape:
        raise GridError(f"{state.name!r}: shape must be a list, not {shape!r:.60}")
    made: Shape = tuple(size(n, f"{state.name!r}: shape") for n in shape)
    block = size(facts.get("blocksize"), f"{state.name!r}: blocksize")
    numbers, scales = found.sibling(weight, "", ""), found.sibling(weight, "", ".absmax")
    count = numel(made)
    _expect(numbers, ("U8",), -(-count // 2), f"a weight of shape {list(made)}")
    if count % 2:
        raise GridError(f"{weight!r} has an odd number of values, which is not decoded")
    blocks = -(-count // block)
    if "nested_blocksize" in facts:
        scales = _nested(found, weight, scales, blocks, facts)
    else:
        _expect(scales, ("F32", "F16", "BF16"), blocks, f"blocks of {block}")
    return _in_blocks(weight, made, (numbers, scales), block, found.sibling(weight, "", _MAP), 16)


_MAP, _NESTED_MAP = ".quant_map", ".nested_quant_map"


def _nested(
    found: Found, weight: str, scales: TensorSpec, blocks: int, facts: dict[str, Any]
) -> TensorSpec:
    """Scales that are quantised themselves, to bytes that stand for values of a list."""
    what = f"{weight!r}: nested_blocksize"
    block = size(facts["nested_blocksize"], what)
    offset = facts.get("nested_offset", 0.0)
    if type(offset) not in (int, float):
        raise GridError(f"{weight!r}: nested_offset must be a number, not {offset!r:.60}")
    _expect(scales, ("U8",), blocks, f"{blocks} blocks")
    outer = found.sibling(weight, "", ".nested_absmax")
    _expect(outer, ("F32",), -(-blocks // block), f"{blocks} blocks")
    table = found.sibling(weight, "", _NESTED_MAP)
    return _in_blocks(
        scales.name, (blocks,), (scales, outer), block, table, 256, offset=float(offset)
    )


def _in_blocks(
    name: str,
    shape: Shape,
    parts: tuple[TensorSpec, TensorSpec],
    block: int,
    table: TensorSpec,
    values: int,
    *,
    offset: float = 0.0,
) -> TensorSpec:
    """Numbers in flat blocks; those of a last block that is short are all one row."""
    _expect(table, ("F32",), values, f"{values} values")
    count = numel(shape)
    rows, columns = (count // block, block) if count % block == 0 else (1, count)
    encoding = Scaled(
        (*parts, table),
        parts[0].dtype,
        code="table4" if values == 16 else "table8",
        rows=rows,
        columns=columns,
        block=(1, block),
        table=2,
        offset=offset,
    )
    return TensorSpec(name, "F32", shape, parts[0].file, encoding=encoding)


def _facts(found: Found, state: TensorSpec) -> dict[str, Any]:
    raw = found.read(state) if found.read is not None and state.dtype == "U8" else b""
    try:
        facts = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GridError(f"{state.name!r} is no JSON: {error}") from error
    if not isinstance(facts, dict):
        raise GridError(f"{state.name!r} is no JSON object")
    return facts


def _expect(spec: TensorSpec, dtypes: tuple[str, ...], count: int, why: str) -> None:
    """Raise GridError for another dtype or number of elements."""
    expect(spec, dtypes, (count,), why, is_flat=True)
