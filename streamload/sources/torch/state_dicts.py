"""Where the weights sit in what ``torch.save`` was given: flat, nested, beside training state."""

from __future__ import annotations

import re
from typing import TypeAlias

from streamload.core.errors import CheckpointError
from streamload.core.wording import listed
from streamload.sources.torch.pickle_records import TensorRef, UnusableTensor, shown

# Keys that training scripts put the model's own state dict under.
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
# Keys whose tensors are never a model's weights, or not the weights asked for (moving averages).
_TRAINING_STATE = re.compile(
    r"ema(_model|_state_dict)?|model_ema|(grad_)?scaler|lr_schedulers?|scheduler(_state_dict)?"
    r"|optim|optimizers?|optimizer_state(s|_dict)?|rng_states?"
)
_MAX_DEPTH = 16
_MAX_ENTRIES = 2_000_000
_SHOWN = 8
Found: TypeAlias = dict[str, TensorRef | UnusableTensor]


def find_weights(root: object) -> tuple[dict[str, TensorRef], list[str]]:
    """The one state dict in ``root``, nested dictionaries flattened with dots; and notices.

    The tensors stand in the file's order.
    ``optimizer``, ``ema`` and their like are never taken; what is left out is told.

    Raises:
        CheckpointError: no dictionary of names, two state dicts that differ, names that collide,
            or tensors of a kind that is not read (all of them are listed).
    """
    if not isinstance(root, dict):
        raise CheckpointError(f"holds {_describe(root)}, expected a dictionary of names to tensors")
    collector = _Collector()
    chosen = _choose(root, collector)
    if chosen is None:
        skipped: list[object] = [
            key
            for key, value in root.items()
            if isinstance(key, str) and _TRAINING_STATE.fullmatch(key) and isinstance(value, dict)
        ]
        found = collector.flatten({key: root[key] for key in root if key not in skipped})
        left_out = [*skipped, *collector.others]
        if not found and any(collector.has_tensor(root[key]) for key in skipped):
            raise CheckpointError(
                f"holds tensors only under {_list(skipped)}, which is not taken for the model's "
                f"weights; save that dictionary by itself"
            )
    else:
        found = collector.flatten(root[chosen])
        left_out = [*(key for key in root if root[key] is not root[chosen]), *collector.others]
    if problems := tuple(
        f"tensor {name!r} is {value.kind}"
        for name, value in found.items()
        if isinstance(value, UnusableTensor)
    ):
        raise CheckpointError(
            f"{'; '.join(problems[:_SHOWN])}: such tensors cannot be read; "
            f"save dense tensors instead",
            problems=problems,
        )
    notices = [f"not part of the weights, left out: {_list(left_out)}"] if left_out else []
    tensors = {name: value for name, value in found.items() if isinstance(value, TensorRef)}
    return tensors, notices


def _choose(root: dict[object, object], collector: _Collector) -> str | None:
    bare = not collector.has_tensor(root)
    candidates = [
        key
        for key in _WRAPPERS
        if isinstance(root.get(key), dict)
        and (collector.has_tensor(root[key]) or (bare and not root[key]))
    ]
    if not candidates:
        return None
    first = candidates[0]
    flat = collector.flatten(root[first]) if len(candidates) > 1 else {}
    for other in candidates[1:]:
        if root[other] is not root[first] and collector.flatten(root[other]) != flat:
            raise CheckpointError(
                f"holds two state dicts that differ, under {first!r} and {other!r}; "
                f"save the one that is meant by itself"
            )
    return first


class _Collector:
    """Walks dictionaries of one file; a walk is bounded in depth and in entries."""

    def __init__(self) -> None:
        self.others: list[object] = []
        self._left = _MAX_ENTRIES

    def flatten(self, tree: object) -> Found:
        """All tensors under ``tree`` by dotted name; what is no tensor goes to ``others``."""
        self.others = []
        found: Found = {}
        if isinstance(tree, dict):
            self._walk(tree, "", 0, found)
        return found

    def _walk(self, tree: dict[object, object], prefix: str, depth: int, found: Found) -> None:
        self._spend(depth, len(tree))
        for key, value in tree.items():
            if isinstance(value, TensorRef | UnusableTensor):
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"a tensor stands under the key {shown(key)}, which is no name"
                    )
                if prefix + key in found:
                    raise CheckpointError("two nested entries have this name", tensor=prefix + key)
                found[prefix + key] = value
            elif isinstance(value, dict) and value and isinstance(key, str):
                self._walk(value, f"{prefix}{key}.", depth + 1, found)
            elif self.has_tensor(value, depth + 1):
                raise CheckpointError(f"tensors stand under the key {shown(key)}, which is no name")
            elif not (isinstance(value, dict) and depth):
                self.others.append(prefix + key if isinstance(key, str) else key)

    def has_tensor(self, tree: object, depth: int = 0) -> bool:
        """True if a tensor is somewhere in the nested dictionaries of ``tree``."""
        if not isinstance(tree, dict):
            return isinstance(tree, TensorRef | UnusableTensor)
        self._spend(depth, len(tree))
        return any(self.has_tensor(value, depth + 1) for value in tree.values())

    def _spend(self, depth: int, entries: int) -> None:
        self._left -= 1 + entries
        if depth > _MAX_DEPTH or self._left < 0:
            raise CheckpointError(
                f"its dictionaries are nested more than {_MAX_DEPTH} deep, or without end"
            )


def _describe(value: object) -> str:
    if isinstance(value, TensorRef | UnusableTensor):
        return "a bare tensor"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _list(keys: list[object]) -> str:
    return listed(map(shown, keys), _SHOWN)
