"""``gptq`` and ``awq``: small whole numbers in 32-bit words, grouped along the inputs."""

from __future__ import annotations

from streamload.core.specs import Shape, TensorSpec
from streamload.decoding.packed import PackedWords
from streamload.decoding.quantized.grids import GridError, expect, size
from streamload.decoding.quantized.records import Found

_WORDS = ".qweight"


def find_gptq(found: Found) -> None:
    """GPTQ: words hold inputs; ``checkpoint_format: gptq_v2`` stores zeros as they are."""
    form = found.config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or found.config.get("is_marlin_format"):
        raise GridError(f"checkpoint_format {form!r:.60} is not decoded")
    _find(found, by_columns=False, zero_offset=int(form == "gptq"))


def find_awq(found: Found) -> None:
    """AWQ: words hold outputs, in the order that its matrix product wants (version GEMM)."""
    version = str(found.config.get("version") or "gemm").lower()
    if version != "gemm":
        raise GridError(f"version {version[:60]!r} is not decoded")
    _find(found, by_columns=True, zero_offset=0)


def _find(found: Found, *, by_columns: bool, zero_offset: int) -> None:
    bits = size(found.config.get("bits", found.config.get("w_bit", 4)), "bits")
    if bits not in ((4,) if by_columns else (2, 4, 8)):
        raise GridError(f"numbers of {bits} bits are not decoded")
    group = found.config.get("group_size", found.config.get("q_group_size", 128))
    for name, words in found.stored.items():
        if not name.endswith(_WORDS):
            continue
        try:
            parts = [words] + [found.sibling(name, _WORDS, e) for e in (".scales", ".qzeros")]
            order = found.stored.get(name.removesuffix(_WORDS) + ".g_idx")
            parts += [order] if order is not None else []
            found.keep(_values(parts, bits, group, by_columns, zero_offset))
        except GridError as error:
            found.problems.append(str(error))
    found.refuse_leftovers((_WORDS, ".qzeros"))


def _values(
    parts: list[TensorSpec], bits: int, group: object, by_columns: bool, zero_offset: int
) -> TensorSpec:
    words, scales, zeros = parts[:3]
    if len(words.shape) != 2 or words.dtype != "I32":
        raise GridError(f"{words.name!r} is {words.dtype} {list(words.shape)}, not I32 of two")
    each = 32 // bits
    rows, columns = words.shape
    inputs, outputs = (rows, columns * each) if by_columns else (rows * each, columns)
    of = inputs if group == -1 else size(group, "group_size")
    count = -(-inputs // of)
    shapes: list[tuple[TensorSpec, Shape, tuple[str, ...]]] = [
        (scales, (count, outputs), ("F16", "BF16", "F32")),
        (zeros, (count, -(-outputs // each)), ("I32",)),
        *((order, (inputs,), ("I32", "I64")) for order in parts[3:]),
    ]
    why = f"{words.name!r} of shape {list(words.shape)} in groups of {of} inputs"
    for spec, shape, dtypes in shapes:
        expect(spec, dtypes, shape, why)
    encoding = PackedWords(
        tuple(parts),
        words.dtype,
        bits=bits,
        inputs=inputs,
        outputs=outputs,
        group=of,
        by_columns=by_columns,
        zero_offset=zero_offset,
    )
    name = words.name.removesuffix(_WORDS) + ".weight"
    strides = (1, outputs)
    return TensorSpec(name, "F32", (outputs, inputs), words.file, None, strides, encoding)
