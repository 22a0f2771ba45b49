"""``mxfp4``: gpt-oss's experts, blocks of 32 E2M1 numbers with a power of two each."""

from __future__ import annotations

from dataclasses import replace

from streamload.core.specs import numel
from streamload.decoding.quantized.grids import GridError, scaled
from streamload.decoding.quantized.records import Found

_BLOCKS, _SCALES = "_blocks", "_scales"


def find(found: Found) -> None:
    """Pair ``NAME_blocks`` ``[..., out, groups, 16]`` with ``NAME_scales`` ``[..., out, groups]``.

    What they make is ``NAME`` ``[..., out, in]``; of experts ``[expert, in, out]``, as the library
    that publishes them multiplies.
    """
    for name, spec in found.stored.items():
        if not name.endswith(_BLOCKS):
            continue
        try:
            scales = found.sibling(name, _BLOCKS, _SCALES)
            if spec.dtype != "U8" or len(spec.shape) < 3 or spec.shape[-1] != 16:
                text = f"{name!r} is {spec.dtype} {list(spec.shape)}"
                raise GridError(f"{text}, not U8 [..., groups, 16]")
            flat = replace(spec, shape=(*spec.shape[:-2], spec.shape[-2] * 16))
            values = scaled(name.removesuffix(_BLOCKS), flat, scales, "fp4", [(1, 32)])
        except GridError as error:
            found.problems.append(str(error))
            continue
        if len(values.shape) == 3:
            experts, rows, columns = values.shape
            strides = (rows * columns, 1, columns)
            values = replace(values, shape=(experts, columns, rows), strides=strides)
        assert numel(values.shape) == 2 * numel(spec.shape), "two numbers a byte"
        found.keep(values)
    found.refuse_leftovers((_BLOCKS, _SCALES))
