"""Whether tensors that hold data can be overwritten in place without one harming another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from streamload.module.targets import real_tensors
from streamload.planning.records import Plan

# Strides nest in practice, which takes a few steps; what takes more is refused unseen.
_MOST_STEPS: Any = 20_000  # numpy's stub knows of two values alone


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """One tensor's bytes: an array that is only ever asked where it lies, never read."""

    name: str
    is_written: bool
    bytes: np.ndarray
    start: int
    stop: int


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
    memories: dict[torch.device, list[_Memory]] = {}
    for names, tensor, is_kept in real_tensors(module):
        is_written = not written.isdisjoint(names)
        if not (is_written or is_kept) or tensor.numel() == 0 or tensor.layout != torch.strided:
            continue
        memory = _memory(names[0], tensor, is_written)
        if is_written and (why := _fault(tensor, memory.bytes)):
            problems.append(f"{names[0]!r} {why}")
        else:
            memories.setdefault(tensor.device, []).append(memory)
    for group in memories.values():
        problems += _overlaps(group)
    return problems


def _memory(name: str, tensor: torch.Tensor, is_written: bool) -> _Memory:
    size, start = tensor.element_size(), tensor.data_ptr()
    # Dimensions of size 1 take no memory, and numpy takes fewer of them than torch.
    dims = [(n, s * size) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    nbytes = size + sum(stride * (n - 1) for n, stride in dims)
    buffer: Any = (ctypes.c_char * nbytes).from_address(start)
    shape, strides = zip(*dims, (size, 1), strict=True)
    array: np.ndarray = np.ndarray(shape, np.uint8, buffer, strides=strides)
    return _Memory(name, is_written, array, start, start + nbytes)


def _fault(tensor: torch.Tensor, memory: np.ndarray) -> str:
    if tensor.is_conj() or tensor.is_neg():
        view = "conjugated" if tensor.is_conj() else "negated"
        return (
            f"is a {view} view of other memory, which cannot be overwritten in place: make it "
            "plain with resolve_conj() or resolve_neg()"
        )
    # Two elements that differ first in a dimension, by as much as they may: the dimensions before
    # it are equal for both, so they cancel out.
    for dimension in range(memory.ndim - 1):
        rest = memory[(0,) * dimension]
        if _share(rest[:1], rest[1:]):
            return (
                f"has elements that share memory (shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())}), so that it cannot be overwritten in place: make it "
                "whole with clone()"
            )
    return ""


def _overlaps(memories: Sequence[_Memory]) -> Iterator[str]:
    """One line for each tensor that has a byte in common with one before it in memory."""
    active: list[_Memory] = []
    for memory in sorted(memories, key=lambda memory: memory.start):
        active = [other for other in active if other.stop > memory.start]
        for other in active:
            if (memory.is_written or other.is_written) and _share(other.bytes, memory.bytes):
                yield (
                    f"{other.name!r} and {memory.name!r} share a part of their memory, so that "
                    "loading one would change the other: make one of them whole with clone()"
                )
                break
        active.append(memory)


def _share(first: np.ndarray, second: np.ndarray) -> bool:
    """True if a byte belongs to both, or to tell would take too long."""
    try:
        return np.shares_memory(first, second, max_work=_MOST_STEPS)
    except np.exceptions.TooHardError:
        return True
