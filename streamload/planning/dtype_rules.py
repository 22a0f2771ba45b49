"""Which dtype a target gets: what a ``dtype=`` request touches, and what is never cast."""

from __future__ import annotations

from streamload.core.dtypes import BY_NAME, DType
from streamload.planning.records import TargetSpec

# Rotary tables are too fine for 16 bits: a rounded one goes wrong on long contexts.
_NEVER_CAST = ("inv_freq", "rope.freqs")


class DtypeError(ValueError):
    """A stored dtype that may not go where it is wanted."""


def target_dtype(
    name: str, stored: tuple[DType, ...], spec: TargetSpec | None, wanted: DType | None
) -> DType:
    """The dtype of the target called ``name``.

    Args:
        name: the target's name.
        stored: the dtypes of its sources.
        spec: the module's tensor, or None if there is no module.
        wanted: the request, which touches floating-point tensors only.

    Raises:
        DtypeError: no counterpart in torch, a change of kind (integer to float), or another
            dtype than that of a tensor which is overwritten in place.
    """
    for dtype in stored:
        if dtype.torch_name is None:
            raise DtypeError(f"dtype {dtype.name} has no dense counterpart in torch")
    found = stored[0]
    if any(dtype != found for dtype in stored):
        if not all(dtype.is_floating for dtype in stored):
            names = " and ".join(dtype.name for dtype in stored)
            raise DtypeError(f"its parts are stored as {names}")
        found = BY_NAME["F32"]
    if name.endswith(_NEVER_CAST):
        wanted = None
    if spec is None:
        return wanted if wanted is not None and found.is_floating else found
    own = BY_NAME[spec.dtype]
    if found.is_floating != own.is_floating or (not found.is_floating and found != own):
        raise DtypeError(
            f"is stored as {found.name}, the module's {spec.kind} is {own.name}: "
            "only floating-point tensors are cast"
        )
    if not found.is_floating:
        return found
    if spec.is_meta:
        return own if spec.is_settled else wanted or found
    if wanted is not None and wanted != own and spec.kind == "parameter":
        raise DtypeError(
            f"holds data as {own.name} and is overwritten in place, so dtype={wanted.torch_name} "
            "cannot be honoured: leave dtype out, or build the module under "
            "streamload.empty_weights()"
        )
    return own
