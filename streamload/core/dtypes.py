"""One table of element types: safetensors name, torch name, size, kind. No torch import.

Source of the names and sizes: the ``Dtype`` enumeration of the safetensors format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamload.core.wording import suggestion


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``bits`` per element; ``torch_name`` is the attribute of ``torch`` or None where torch has no
    dense counterpart (such tensors can be listed, not loaded); ``kind`` is ``"float"``,
    ``"float8"`` (a float whose values usually need a scale), ``"int"``, ``"bool"`` or
    ``"complex"``.
    """

    name: str
    torch_name: str | None
    bits: int
    kind: str

    @property
    def itemsize(self) -> int:
        """Bytes per element; only for types of whole bytes."""
        return self.bits // 8

    @property
    def is_floating(self) -> bool:
        return self.kind in ("float", "float8")


_TABLE = (
    DType("BOOL", "bool", 8, "bool"),
    DType("U8", "uint8", 8, "int"),
    DType("I8", "int8", 8, "int"),
    DType("I16", "int16", 16, "int"),
    DType("U16", "uint16", 16, "int"),
    DType("F16", "float16", 16, "float"),
    DType("BF16", "bfloat16", 16, "float"),
    DType("I32", "int32", 32, "int"),
    DType("U32", "uint32", 32, "int"),
    DType("F32", "float32", 32, "float"),
    DType("F64", "float64", 64, "float"),
    DType("I64", "int64", 64, "int"),
    DType("U64", "uint64", 64, "int"),
    DType("C64", "complex64", 64, "complex"),
    DType("C128", "complex128", 128, "complex"),
    DType("F8_E4M3", "float8_e4m3fn", 8, "float8"),
    DType("F8_E5M2", "float8_e5m2", 8, "float8"),
    DType("F8_E8M0", "float8_e8m0fnu", 8, "float8"),
    DType("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, "float8"),
    DType("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, "float8"),
    DType("F6_E2M3", None, 6, "float8"),
    DType("F6_E3M2", None, 6, "float8"),
    DType("F4", None, 4, "float8"),
)

BY_NAME: dict[str, DType] = {d.name: d for d in _TABLE}
BY_TORCH_NAME: dict[str, DType] = {d.torch_name: d for d in _TABLE if d.torch_name}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def nbytes_of(dtype: DType, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense tensor of ``shape``, or None if they are not whole."""
    nbytes, rest = divmod(dtype.bits * math.prod(shape), 8)
    return None if rest else nbytes


def parse_dtype(value: object) -> DType | None:
    """The table's entry for a torch dtype, a torch or a safetensors name; None stays None.

    Raises:
        ValueError: nothing in the table has that name.
    """
    if value is None or isinstance(value, DType):
        return value
    text = str(value).removeprefix("torch.")
    found = BY_TORCH_NAME.get(_ALIASES.get(text.lower(), text)) or BY_NAME.get(text)
    if found is None:
        names = [name for name, dtype in BY_TORCH_NAME.items() if dtype.is_floating]
        near = suggestion(text.lower(), names)
        raise ValueError(f"unknown dtype {value!r}; known: {', '.join(sorted(names))}{near}")
    return found
