"""Which of all that a run saved are the model's weights: the nest they lie in is taken off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamload.core.errors import CheckpointError
from streamload.core.specs import contiguous_strides, numel
from streamload.core.wording import listed
from streamload.sources.distributed.saved_state import SavedState
from streamload.sources.torch.pickle_records import StorageRef, TensorRef
from streamload.sources.torch.state_dicts import TRAINING_STATE, WRAPPERS, find_weights

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Weights:
    """The model's part of a saved state.

    Attributes:
        tensors, objects: the name it is listed under → its name in the saved state.
        notices: where it was found, and what is left out.
    """

    tensors: Mapping[str, str]
    objects: Mapping[str, str]
    notices: tuple[str, ...]


def choose_weights(state: SavedState, prefix: str | None, *, file_bytes: int) -> Weights:
    """The model's weights in ``state``: what ``find_weights`` finds in its nested dictionaries.

    A state under one more name (``app.model``, as an application that saves itself has it) is
    found, too. ``prefix`` takes just the names under it, as they are in the saved state, be they
    an optimizer's.

    Raises:
        CheckpointError: several state dicts and no prefix, or no weights at all.
    """
    start = f"{prefix}." if prefix and not prefix.endswith(".") else prefix or ""
    if start and any(name.startswith(start) for name in state.tensors):
        under = {name: name for name in state.tensors if _is_wanted(name, start)}
        objects = {name: name for name in state.objects if _is_wanted(name, start)}
        left = {name for name in (*state.tensors, *state.objects) if not _is_wanted(name, start)}
        keys = {n.split(".")[0] if not n.startswith(start) else _key(n, start) for n in left}
        return Weights(under, objects, _left_out(keys))
    if not state.paths:
        return _flat(state)
    root = _nested(state)
    while len(root) == 1 and _holds_wrapper(inner := next(iter(root.values()))):
        root = inner
    found, notices, beside = find_weights(root, file_bytes=file_bytes)
    tensors = {name: ref.storage.key for name, ref in found.items()}
    objects = {n: saved for n, saved in beside.objects.items() if isinstance(saved, str)}
    if apart := [name for name in beside.objects if name not in objects]:
        notices.append(f"extra states that were taken apart are left out: {listed(apart, _SHOWN)}")
    nests = sorted({saved.removesuffix(name) for name, saved in tensors.items()} - {""})
    if nests:
        notices.append(f"the leading {listed(map(repr, nests), 3)} of all names is taken off")
    return Weights(tensors, objects, tuple(notices))


def _key(name: str, start: str) -> str:
    """The first word behind the prefix, with it."""
    return start + name[len(start) :].split(".")[0]


def _is_wanted(name: str, start: str) -> bool:
    """True for what stands under a prefix, training state beside it left out."""
    if not name.startswith(start):
        return False
    first, dot, _ = name[len(start) :].partition(".")
    return not (dot and TRAINING_STATE.fullmatch(first))


def _nested(state: SavedState) -> dict[Any, Any]:
    """The dictionaries that were saved; a tensor's storage is called by its flat name."""
    root: dict[Any, Any] = {}
    for name in (*state.tensors, *state.objects):
        place = root
        *keys, last = state.paths.get(name, (name,))
        for key in keys:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError("other names lie under that of a value", tensor=name)
        if last in place:
            raise CheckpointError("it is saved as a value and as a dictionary", tensor=name)
        place[last] = _standing_for(name, state)
    return root


def _standing_for(name: str, state: SavedState) -> TensorRef | str:
    saved = state.tensors.get(name)
    if saved is None:
        return name
    storage = StorageRef(name, saved.dtype, numel(saved.shape))
    return TensorRef(storage, saved.dtype, 0, saved.shape, contiguous_strides(saved.shape))


def _holds_wrapper(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(key), dict) for key in WRAPPERS)


def _flat(state: SavedState) -> Weights:
    """Of a state whose writer noted no keys: all but training state, by the first word."""
    names = [*state.tensors, *state.objects]
    left = {
        head
        for name in names
        if "." in name and TRAINING_STATE.fullmatch(head := name.split(".")[0])
    }
    tensors = {name: name for name in state.tensors if name.split(".")[0] not in left}
    if not tensors:
        what = f"of a model, only {listed(map(repr, sorted(left)), 4)}" if left else "at all"
        raise CheckpointError(f"holds no tensors {what}")
    return Weights(tensors, {}, _left_out(left | {n for n in state.objects if "." not in n}))


def _left_out(keys: set[str]) -> tuple[str, ...]:
    if not keys:
        return ()
    return (f"not part of the weights, left out: {listed(map(repr, sorted(keys)), _SHOWN)}",)
