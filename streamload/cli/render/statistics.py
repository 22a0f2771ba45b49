"""One tensor's numbers, computed a block at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from streamload.cli.render.tables import columns, heading
from streamload.core.errors import CheckpointError
from streamload.core.wording import format_bytes, printable, suggestion

if TYPE_CHECKING:
    import torch

    from streamload.sources.base import Source

_BLOCK_ELEMENTS = 1 << 20
_FEW = 6


def describe(source: Source, name: str) -> dict[str, Any]:
    """dtype, shape, range, mean, deviation, counts and a few values of a stored tensor.

    The range, mean and (population) standard deviation are those of the finite values, null if
    there are none; complex tensors have none. Infinities among ``values`` are strings, as JSON
    has no numbers for them.

    Raises:
        CheckpointError: there is no such tensor; close names are suggested.
    """
    spec = source.catalog.get(name)
    if spec is None:
        stored_as = _stored_names(source, name)
        if stored_as:
            names = " + ".join(map(repr, stored_as))
            raise CheckpointError(
                f"no tensor named {name!r}: that is the model's name, stored as {names}",
                path=source.path,
            )
        hint = suggestion(name, source.catalog, most=3)
        raise CheckpointError(f"no tensor named {name!r}{hint}", path=source.path)
    tensor = source.tensor(name)
    flat = tensor.reshape(-1)
    ends = [*flat[:_FEW].tolist(), *flat[_FEW:][-_FEW:].tolist()]
    return {
        "ok": True,
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "nbytes": spec.nbytes,
        "file": printable(spec.file),
        **_statistics(flat),
        "values": [value if _fits_json(value) else str(value) for value in ends],
        "values_left_out": max(0, flat.numel() - 2 * _FEW),
    }


def _stored_names(source: Source, name: str) -> tuple[str, ...]:
    """Which stored tensors fill the model's tensor ``name``; none if no table is known."""
    from streamload.mapping.choose import choose_binding
    from streamload.mapping.configuration import config_to_build

    try:
        config, _ = config_to_build(source.config(), source.catalog, path=source.path)
    except CheckpointError:
        return ()
    _, binding = choose_binding(config, source.catalog, None)
    return next((a.sources for a in binding.assignments if name in a.targets), ())


def _fits_json(value: object) -> bool:
    """True for what JSON has: whole numbers, booleans, finite floats."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _statistics(flat: torch.Tensor) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "std"))
    found |= {"nan": 0, "inf": 0, "zero": 0}
    low, high, total, squares, count = float("inf"), float("-inf"), 0.0, 0.0, 0
    shift: float | None = None  # the first block's mean, so that squares do not cancel
    for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[start : start + _BLOCK_ELEMENTS]
        wide = block if block.is_complex() else block.to(torch.float64)
        nan = torch.isnan(wide)
        finite = torch.isfinite(wide)
        found["nan"] += int(nan.sum())
        found["inf"] += int((~finite & ~nan).sum())
        found["zero"] += int((wide == 0).sum())
        values = wide[finite]
        if values.numel() == 0 or wide.is_complex():
            continue
        if shift is None:
            shift = float(values.mean())
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        moved = values - shift
        total += float(moved.sum())
        squares += float(moved.square().sum())
        count += values.numel()
    if count and shift is not None:
        mean = total / count
        std = max(squares / count - mean * mean, 0.0) ** 0.5
        found |= {"min": low, "max": high, "mean": shift + mean, "std": std}
    return found


def show(facts: dict[str, Any]) -> str:
    numbers = [(key, _number(facts[key])) for key in ("min", "max", "mean", "std")]
    counts = [(key, f"{facts[key]:,}") for key in ("nan", "inf", "zero")]
    values = [_number(value) for value in facts["values"]]
    if facts["values_left_out"]:
        values.insert(_FEW, f"… {facts['values_left_out']:,} more …")
    head = f"{facts['dtype']} {facts['shape']}, {format_bytes(facts['nbytes'])}"
    rows = [pair for pair in (*numbers, *counts) if pair[1] != "none"]
    lines = [heading(facts["name"]), head, *columns(rows), f"values  {' '.join(values)}"]
    return "\n".join([*lines, *(f"notice: {notice}" for notice in facts.get("notices", ()))])


def _number(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
