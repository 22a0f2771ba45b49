"""Where the weights sit in what ``torch.save`` was given: flat, nested, beside training state."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from streamload.core.errors import CheckpointError
from streamload.core.wording import listed
from streamload.sources.torch.pickle_records import (
    MAX_NAME_CHARS,
    Entries,
    Placeholder,
    TensorRef,
    UnusableTensor,
    holds_tensor,
    shown,
)

# Keys that training scripts put the model's own state dict under.
WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
# Keys that are such only if nothing beside them holds tensors: they are names of modules too.
_LONE_WRAPPERS = frozenset(
    {"params", "net", "network", "weights", "model_state", "model_weights", "net_state_dict"}
    | {"generator", "discriminator", "student", "teacher", "netG", "G", "params_ema", "g_ema"}
)
# Keys whose tensors are never a model's weights, or not the weights asked for (moving averages).
TRAINING_STATE = re.compile(
    r"ema(_model|_state_dict)?|(model|state_dict|params|g)_ema|(grad_|amp_)?scaler"
    r"|train(ing|er)?_state|data_?loaders?|(lr_)?schedulers?(_state_dict)?|optim(_\w+)?|\w*optimizers?\w*|rng_states?"
)
_MAX_DEPTH = 16
# Entries that are walked, and characters of dotted names; and how many more for each byte of the
# file. The same dictionary may stand in many places, and again in those.
_ENTRIES, _ENTRIES_PER_BYTE = 200_000, 1 / 20
_TENSORS, _TENSORS_PER_BYTE = 4_000, 1 / 400
_NAME_CHARS, _NAME_CHARS_PER_BYTE = 4 << 20, 2
_SHOWN = 8
# Where torch keeps what a module's get_extra_state() gives.
_EXTRA_STATE = "_extra_state"
_SAVE = "Save plain tensors by themselves: torch.save(model.state_dict(), ...)"
Found: TypeAlias = dict[str, TensorRef | UnusableTensor]


@dataclass(frozen=True, slots=True)
class Beside:
    """What a state dict holds beside tensors, as records.

    Attributes:
        objects: extra states that are no tensors, by name.
        versions: module path → what the state dict notes of it.
    """

    objects: dict[str, object] = field(default_factory=dict)
    versions: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def find_weights(
    root: object, prefix: str | None = None, *, file_bytes: int
) -> tuple[dict[str, TensorRef], list[str], Beside]:
    """The one state dict in ``root``, nested dictionaries flattened with dots; and notices.

    The tensors stand in the file's order. ``optimizer``, ``ema`` and their like are not taken
    unless ``prefix`` begins with their key, which then stays in the names; what is left out is
    told. The walk is bounded by ``file_bytes``, the size of the whole file.

    Raises:
        CheckpointError: no dictionary of names, two state dicts that differ, names that collide,
            or tensors of a kind that is not read (all of them are listed).
    """
    if isinstance(root, Placeholder):
        raise CheckpointError(
            f"holds a whole pickled object of {shown(root)}, which is not rebuilt: that could run "
            f"code. {_SAVE}"
        )
    if not isinstance(root, dict):
        raise CheckpointError(f"holds {_describe(root)}, expected a dictionary of names to tensors")
    collector = _Collector(file_bytes)
    found, left_out, notices = _choose(root, (prefix or "").split("."), collector)
    if problems := tuple(
        f"tensor {name!r} is {value.kind}"
        for name, value in found.items()
        if isinstance(value, UnusableTensor)
    ):
        raise CheckpointError(
            f"{'; '.join(problems[:_SHOWN])}: such tensors cannot be read. {_SAVE}",
            problems=problems,
        )
    if not found and (objects := [v for v in root.values() if isinstance(v, Placeholder)]):
        raise CheckpointError(
            f"holds no tensors, but objects of {_list(objects)}, which are not rebuilt. {_SAVE}"
        )
    if len(found) > 1 and all(isinstance(t, TensorRef) and t.shape == (0,) for t in found.values()):
        raise CheckpointError(
            "all its tensors are empty: placeholders that DeepSpeed's ZeRO-3 leaves where the "
            "weights are cut up between ranks; put them together with zero_to_fp32.py"
        )
    if left_out:
        notices.append(f"not part of the weights, left out: {_list(left_out)}")
    if collector.beside.objects:
        notices.append(
            "extra states that are no tensors, for modules that take them: "
            + _list(collector.beside.objects)
        )
    tensors = {name: value for name, value in found.items() if isinstance(value, TensorRef)}
    return tensors, notices, collector.beside


def _choose(
    root: dict[object, object], prefix: list[str], collector: _Collector
) -> tuple[Found, list[object], list[str]]:
    """The tensors that are meant, what of ``root`` is left out, and notices."""
    skipped: list[object] = [
        key
        for key, value in root.items()
        if isinstance(key, str) and TRAINING_STATE.fullmatch(key) and isinstance(value, dict)
    ]
    holders = [key for key in root if isinstance(root[key], dict) and key not in skipped]
    holders = [key for key in holders if collector.has_tensor(root[key])]
    if not holders and len(lone := [key for key in skipped if key in _LONE_WRAPPERS]) == 1:
        # Published by itself, an average is what is meant.
        holders = [key for key in lone if collector.has_tensor(root[key])]
    wrappers = _wrappers(root, holders, collector)
    asked = prefix[0]
    if collector.has_tensor(root.get(asked, {})) and (asked in skipped or len(wrappers) > 1):
        found = collector.flatten({asked: root[asked]})
        return found, [key for key in root if root[key] is not root[asked]], []
    if len(wrappers) > 1:
        count = {2: "two", 3: "three"}.get(len(wrappers), str(len(wrappers)))
        raise CheckpointError(
            f"holds {count} state dicts that differ, under {' and '.join(map(repr, wrappers))}; "
            f"pass {' or '.join(f'prefix={key!r}' for key in wrappers)}, or save the one that is "
            "meant by itself"
        )
    if wrappers:
        chosen = root[wrappers[0]]
        found = collector.flatten(chosen)
        left_out = [*(key for key in root if root[key] is not chosen), *collector.others]
        ways = " or ".join(
            f"prefix={key!r}"
            for key in skipped
            if key != wrappers[0] and root[key].keys() == chosen.keys()  # type: ignore[attr-defined]
        )
        more = [f"other weights of the same names are there: {ways} takes them"] if ways else []
        return found, left_out, more
    found = collector.flatten(root, skipped)
    left_out = [*skipped, *collector.others]
    others = [key for key in skipped if collector.has_tensor(root[key])]
    if others and not found:
        raise CheckpointError(
            f"holds tensors only under {_list(others)}, which is not taken for the model's "
            f"weights; pass prefix={shown(others[0])}, or save that dictionary by itself"
        )
    halves = [key for key in holders if key in _LONE_WRAPPERS]
    if len(halves) < 2:
        return found, left_out, []
    ways = " or ".join(f"prefix={key!r}" for key in halves)
    return found, left_out, [f"holds {len(halves)} state dicts: {ways} takes one of them"]


def _wrappers(
    root: dict[object, object], holders: list[object], collector: _Collector
) -> list[str]:
    """The keys of ``root`` with a state dict of its own under them; of equal ones the first."""
    bare = not collector.has_tensor(root)
    keys = [
        key
        for key in WRAPPERS
        if isinstance(root.get(key), dict) and (key in holders or (bare and not root[key]))
    ]
    if not keys and len(holders) == 1 and holders[0] in _LONE_WRAPPERS:
        direct = any(isinstance(value, TensorRef | UnusableTensor) for value in root.values())
        return [] if direct else [str(holders[0])]
    if len(keys) < 2:
        return keys
    first = collector.flatten(root[keys[0]])
    return [
        keys[0],
        *(
            key
            for key in keys[1:]
            if root[key] is not root[keys[0]] and collector.flatten(root[key]) != first
        ),
    ]


class _Collector:
    """Walks dictionaries of one file; all walks together are bounded."""

    def __init__(self, file_bytes: int) -> None:
        self.others: list[object] = []
        self.beside = Beside()
        self._entries = _ENTRIES + int(_ENTRIES_PER_BYTE * file_bytes)
        self._tensors = _TENSORS + int(_TENSORS_PER_BYTE * file_bytes)
        self._chars = _NAME_CHARS + _NAME_CHARS_PER_BYTE * file_bytes
        self._empty: set[int] = set()

    def flatten(self, tree: object, skipped: Collection[object] = ()) -> Found:
        """All tensors under ``tree`` by dotted name; what is no tensor goes to ``others``."""
        self.others = []
        self.beside = Beside()
        found: Found = {}
        if isinstance(tree, dict):
            self._note_versions(tree, "")
            self._walk({k: v for k, v in tree.items() if k not in skipped}, "", 0, found)
        return found

    def _walk(self, tree: dict[object, object], prefix: str, depth: int, found: Found) -> None:
        self._spend(depth, len(tree))
        self._note_versions(tree, prefix)
        for key, value in tree.items():
            if isinstance(value, TensorRef | UnusableTensor):
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"a tensor stands under the key {shown(key)}, which is no name"
                    )
                name = self._joined(prefix, key)
                if name in found:
                    raise CheckpointError("two nested entries have this name", tensor=name)
                found[name] = value
                if len(found) > self._tensors:
                    raise CheckpointError(
                        f"holds more than {self._tensors} tensors, which is more than a file of "
                        "its size should"
                    )
            elif isinstance(key, str) and key.rpartition(".")[2] == _EXTRA_STATE:
                self.beside.objects[self._joined(prefix, key)] = value
            elif isinstance(value, Placeholder) and self._holds_tensor(value):
                name = self._joined(prefix, key) if isinstance(key, str) else shown(key)
                found[name] = UnusableTensor(f"inside a whole object of {shown(value)}")
            elif isinstance(value, dict) and value and isinstance(key, str):
                self._walk(value, f"{self._joined(prefix, key)}.", depth + 1, found)
            elif self.has_tensor(value, depth + 1):
                raise CheckpointError(f"tensors stand under the key {shown(key)}, which is no name")
            elif not (isinstance(value, dict) and depth):
                self.others.append(self._joined(prefix, key) if isinstance(key, str) else key)

    def _joined(self, prefix: str, key: str) -> str:
        self._chars -= len(prefix) + len(key)
        if len(prefix) + len(key) > MAX_NAME_CHARS or self._chars < 0:
            raise CheckpointError(
                f"holds a name of more than {MAX_NAME_CHARS} characters, or more names than a "
                "file of its size should"
            )
        return prefix + key

    def _holds_tensor(self, value: Placeholder) -> bool:
        """Looked through once, however often it stands somewhere."""
        if id(value) in self._empty:
            return False
        found = holds_tensor(value)
        if not found:
            self._empty.add(id(value))
        return found

    def _note_versions(self, tree: dict[object, object], prefix: str) -> None:
        """What the state dict at ``prefix`` notes of its modules (torch's ``_metadata``)."""
        attributes = tree.state if isinstance(tree, Entries) else None
        noted = attributes.get("_metadata") if isinstance(attributes, dict) else None
        for path, of in noted.items() if isinstance(noted, dict) else ():
            if isinstance(path, str) and isinstance(of, dict):
                plain = {n: v for n, v in of.items() if isinstance(v, int | str | None)}
                self.beside.versions[(prefix + path).rstrip(".")] = plain

    def has_tensor(self, tree: object, depth: int = 0) -> bool:
        """True if a tensor is somewhere in the nested dictionaries of ``tree``."""
        if not isinstance(tree, dict):
            return isinstance(tree, TensorRef | UnusableTensor)
        self._spend(depth, len(tree))
        return any(self.has_tensor(value, depth + 1) for value in tree.values())

    def _spend(self, depth: int, entries: int) -> None:
        self._entries -= 1 + entries
        if depth > _MAX_DEPTH or self._entries < 0:
            raise CheckpointError(
                f"its dictionaries are nested more than {_MAX_DEPTH} deep, or without end, or the "
                "same ones again and again"
            )


def _describe(value: object) -> str:
    if isinstance(value, TensorRef | UnusableTensor):
        return "a bare tensor"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _list(keys: Iterable[object]) -> str:
    return listed(map(shown, keys), _SHOWN)
