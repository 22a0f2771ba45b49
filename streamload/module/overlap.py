"""Whether tensors that hold data can be overwritten in place without one harming another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from streamload.module.commit import real_tensors
from streamload.planning.records import Plan

__all__ = ["in_place_problems"]

# Strides nest in practice, which takes a few steps; what takes more is refused unseen.
_MOST_STEPS = 20_000
# (stride, least, greatest coefficient)
_Term = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Held:
    """One tensor in memory, from the byte ``start`` up to ``stop``;
    ``dims`` are its (stride in bytes, size), those of an element last.
    """

    name: str
    is_written: bool
    start: int
    stop: int
    dims: tuple[tuple[int, int], ...]


def in_place_problems(module: nn.Module, plan: Plan) -> list[str]:
    """What refuses to overwrite the module's tensors that hold data.

    A target may be any strided view of its storage, and share it with others that have no byte
    in common, or that are the very same view (a tie). Refused are targets that are a conjugated
    or negated view (they hold other values than their memory), that overlap themselves
    (expanded ones), or that overlap another parameter, persistent buffer or target.
    """
    written = {n for t in plan.tensors if not t.is_new for n in (t.name, *t.aliases)}
    if not written:
        return []
    problems: list[str] = []
    held: dict[torch.device, list[_Held]] = {}
    for names, tensor, is_kept in real_tensors(module):
        is_written = not written.isdisjoint(names)
        if not (is_written or is_kept) or tensor.numel() == 0 or tensor.layout != torch.strided:
            continue
        if is_written:
            why = _fault(tensor)
            if why:
                problems.append(f"{names[0]!r} {why}")
                continue
        held.setdefault(tensor.device, []).append(_held(names[0], tensor, is_written))
    for group in held.values():
        problems += _overlaps(group)
    return problems


def _fault(tensor: torch.Tensor) -> str:
    if tensor.is_conj() or tensor.is_neg():
        view = "conjugated" if tensor.is_conj() else "negated"
        return (
            f"is a {view} view of other memory, which cannot be overwritten in place: make it "
            "plain with resolve_conj() or resolve_neg()"
        )
    dims = list(zip(tensor.stride(), tensor.shape, strict=True))
    if any(stride == 0 and size > 1 for stride, size in dims) or _can_be_zero(
        [(stride, 1 - size, size - 1) for stride, size in dims if size > 1], 0, trivially=False
    ):
        return (
            f"has elements that share memory (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}), so that it cannot be overwritten in place: make it whole "
            "with clone()"
        )
    return ""


def _held(name: str, tensor: torch.Tensor, is_written: bool) -> _Held:
    itemsize = tensor.element_size()
    dims = [(s * itemsize, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    dims.append((1, itemsize))
    span = sum(stride * (size - 1) for stride, size in dims)
    start = tensor.data_ptr()
    return _Held(name, is_written, start, start + span + 1, tuple(dims))


def _overlaps(group: Sequence[_Held]) -> Iterator[str]:
    """One line for each tensor that has a byte in common with one before it in memory."""
    active: list[_Held] = []
    for tensor in sorted(group, key=lambda held: held.start):
        active = [other for other in active if other.stop > tensor.start]
        for other in active:
            if (tensor.is_written or other.is_written) and _overlap(other, tensor):
                yield (
                    f"{other.name!r} and {tensor.name!r} share a part of their memory, so that "
                    "loading one would change the other: make one of them whole with clone()"
                )
                break
        active.append(tensor)


def _overlap(first: _Held, second: _Held) -> bool:
    """True if a byte belongs to both: first.start + Σ i·s = second.start + Σ j·t somewhere."""
    terms: dict[int, list[int]] = {}
    for stride, size in first.dims:
        terms.setdefault(stride, [0, 0])[1] += size - 1
    for stride, size in second.dims:
        terms.setdefault(stride, [0, 0])[0] -= size - 1
    bounded = [(stride, low, high) for stride, (low, high) in terms.items() if stride]
    return _can_be_zero(bounded, second.start - first.start)


def _can_be_zero(terms: Sequence[_Term], total: int, *, trivially: bool = True) -> bool:
    """True if Σ c·stride = total for some whole c within their bounds (or that takes too long).

    Args:
        terms: strides over 0, with the bounds of their coefficients.
        total: what the sum must be.
        trivially: whether all coefficients may be 0.
    """
    ordered = sorted(terms, reverse=True)
    # What the terms from each place on can add up to.
    reach = [(0, 0)]
    for stride, low, high in reversed(ordered):
        reach.append((reach[-1][0] + low * stride, reach[-1][1] + high * stride))
    reach.reverse()
    waiting = [(0, total, trivially)]
    for _ in range(_MOST_STEPS):
        if not waiting:
            return False
        at, rest, done = waiting.pop()
        if at == len(ordered):
            if rest == 0 and done:
                return True
            continue
        stride, low, high = ordered[at]
        least, most = reach[at + 1]
        first = max(low, -((most - rest) // stride))
        last = min(high, (rest - least) // stride)
        if last - first > _MOST_STEPS:
            return True
        waiting += [(at + 1, rest - c * stride, done or c != 0) for c in range(first, last + 1)]
    return True
