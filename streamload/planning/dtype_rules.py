"""Which dtype a target gets: what a ``dtype=`` request touches, and what is never cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from streamload.core.dtypes import BY_NAME, DType
from streamload.core.wording import listed
from streamload.planning.records import TargetSpec

# Rotary tables are too fine for 16 bits: a rounded one goes wrong on long contexts.
NEVER_CAST = ("inv_freq", "rope.freqs")


class DtypeError(ValueError):
    """A stored dtype that may not go where it is wanted."""


def target_dtype(
    name: str,
    stored: tuple[DType, ...],
    spec: TargetSpec | None,
    wanted: DType | None,
    *,
    reduces: str = "",
) -> DType:
    """The dtype of the target called ``name``.

    Parts of several floating-point types make a target that holds all of them: float64 where one
    is, else float32.

    Args:
        name: the target's name.
        stored: the dtypes of its sources.
        spec: the module's tensor, or None if there is no module.
        wanted: the request, which touches floating-point tensors only.
        reduces: ``"sum"`` or ``"mean"`` if the target is that of its sources.

    Raises:
        DtypeError: no counterpart in torch, a sum or mean of booleans, a change of kind (integer
            to float), or another dtype than that of a tensor which is overwritten in place.
    """
    for dtype in stored:
        if dtype.torch_name is None:
            raise DtypeError(f"dtype {dtype.name} has no dense counterpart in torch")
    found = stored[0]
    if any(dtype != found for dtype in stored):
        if not all(dtype.is_floating for dtype in stored):
            names = " and ".join(dtype.name for dtype in stored)
            raise DtypeError(f"its parts are stored as {names}")
        found = BY_NAME["F64" if BY_NAME["F64"] in stored else "F32"]
    if reduces and found.kind == "bool":
        raise DtypeError(f"booleans have no {reduces}: its partitions are stored as BOOL")
    if name.endswith(NEVER_CAST):
        wanted = None
    if spec is None:
        return wanted if wanted is not None and found.is_floating else found
    own = BY_NAME[spec.dtype]
    if spec.is_meta and spec.is_settled and own.is_floating:
        return own
    if found.is_floating != own.is_floating or (not found.is_floating and found != own):
        raise DtypeError(
            f"is stored as {found.name}, the module's {spec.kind} is {own.name}: "
            "only floating-point tensors are cast"
        )
    if not found.is_floating:
        return found
    if spec.is_meta:
        return wanted or found
    if wanted is not None and wanted != own and spec.kind == "parameter":
        raise DtypeError(
            f"holds data as {own.name} and is overwritten in place, so dtype={wanted.torch_name} "
            "cannot be honoured: leave dtype out, or build the module under "
            "streamload.empty_weights()"
        )
    return own


def refuse_mixed(
    names: Sequence[str], stored: Sequence[str], spec: TargetSpec | None, wanted: DType | None
) -> None:
    """Refuse a stack of several dtypes where nothing says which one is meant.

    ``names`` are of the tensors that are stacked, ``stored`` their dtypes by safetensors name; the
    others are as for ``target_dtype``.

    Raises:
        DtypeError: some are stored as another dtype than most.
    """
    counts = Counter(stored)
    if len(counts) == 1:
        return
    can_be_cast = all(BY_NAME[dtype].is_floating for dtype in counts)
    is_known = spec is not None and (spec.is_settled or not spec.is_meta)
    if can_be_cast and (wanted is not None or is_known):
        return
    ((usual, _),) = counts.most_common(1)
    pairs = zip(names, stored, strict=True)
    odd = [f"{name!r} is {dtype}" for name, dtype in pairs if dtype != usual]
    way_out = ": say with dtype= which is meant" if can_be_cast else ""
    raise DtypeError(f"most of what is stacked is {usual}, but {listed(odd, 4)}{way_out}")
