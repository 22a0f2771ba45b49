"""From a module's names, which adapters have, to the names that are stored of the base model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

# What wraps a model, or is wrapped, in one of the two and not in the other.
_WRAPPERS = frozenset(
    ("module", "_orig_mod", "model", "base_model", "transformer", "language_model", "text_model")
)
# Modules that have other names in files than in the classes of transformers.
_OTHER_NAMES = ((".mlp.", ".block_sparse_moe."),)
_DEEPEST = 3

# The start that is taken off a module's name, and the one that is put there.
_Change = tuple[tuple[str, ...], tuple[str, ...]]


class Renaming:
    """Which stored tensor a tensor of the base model is.

    Args:
        wanted: names of tensors as the adapter's base model has them.
        stored: the base's stored names.

    Attributes:
        doubtful: names that may be several stored ones, with these.
    """

    def __init__(self, wanted: Collection[str], stored: Collection[str]) -> None:
        self._stored = frozenset(stored)
        self.doubtful: dict[str, tuple[str, ...]] = {}
        strange = [name for name in wanted if name not in self._stored]
        self._changes = _changes(strange, stored) if strange else []

    def __call__(self, name: str) -> str | None:
        """The stored name, or None."""
        for variant in _variants(name):
            if variant in self._stored:
                return variant
        for changes in self._changes:
            found = {new for change in changes for new in _changed(name, change)}
            found &= self._stored
            if len(found) > 1:
                self.doubtful[name] = tuple(sorted(found))
            if found:
                return min(found)
        return None

    def new_name(self, name: str) -> str:
        """What a tensor would be called that is not stored, beside those that are."""
        for changes in self._changes:
            for change in changes:
                if change[0] and (new := next(iter(_changed(name, change)), None)):
                    return new
        return name


def _changes(wanted: Iterable[str], stored: Iterable[str]) -> list[list[_Change]]:
    """All changes that some name is stored by, the likeliest first; equally likely together."""
    starts: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in stored:
        for start, rest in _cuts(name):
            starts.setdefault(rest, []).append(start)
    votes: Counter[_Change] = Counter()
    for name in wanted:
        for variant in _variants(name):
            for off, rest in _cuts(variant):
                for on in starts.get(rest, ()):
                    if _is_a_wrapper(off, on):
                        votes[off, on] += 1
    ranked: dict[tuple[int, int], list[_Change]] = {}
    for change, count in votes.items():
        ranked.setdefault((-count, len(change[0]) + len(change[1])), []).append(change)
    return [ranked[rank] for rank in sorted(ranked)]


def _cuts(name: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """A name cut in two, at each of its first segments."""
    parts = tuple(name.split("."))
    for at in range(min(_DEEPEST, len(parts) - 2) + 1):
        yield parts[:at], parts[at:]


def _is_a_wrapper(off: tuple[str, ...], on: tuple[str, ...]) -> bool:
    """Well-known wrappers come off and go on; of others, one on one side only."""
    known = _WRAPPERS.issuperset((*off, *on))
    return known or (len(off) + len(on) == 1 and not (off + on)[0].isdigit())


def _variants(name: str) -> Iterator[str]:
    yield name
    for ours, theirs in _OTHER_NAMES:
        if ours in name:
            yield name.replace(ours, theirs)


def _changed(name: str, change: _Change) -> Iterator[str]:
    off, on = change
    start = "".join(f"{part}." for part in off)
    for variant in _variants(name):
        if variant.startswith(start):
            yield ".".join((*on, variant[len(start) :]))
