"""What each rank says of its load before it begins, and what to make of all of these: pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamload.core.errors import MemoryBudgetError, RankError
from streamload.core.wording import format_bytes, listed, printable


@dataclass(frozen=True, slots=True)
class Card:
    """One rank's load, before its first byte.

    Attributes:
        path: of the checkpoint, as this rank has it.
        files, module, options: digests of what is stored, what it goes into, and how.
        host: of ranks that take from the same memory.
        needed_bytes, available_bytes, limit: of host memory, as in MemoryReport.
    """

    path: str
    files: str
    module: str
    options: str
    host: str
    needed_bytes: int
    available_bytes: int
    limit: str


# What may differ, and how it is said; options first, of which a plan's dtypes come.
_ASPECTS = {
    "files": "has other files",
    "options": "was called with other options",
    "module": "has another module",
}


def refuse_differences(cards: Mapping[int, Card]) -> None:
    """Raise RankError, the same one on every rank, if ranks are about to load different things."""
    for aspect, words in _ASPECTS.items():
        found = {rank: getattr(card, aspect) for rank, card in cards.items()}
        # What most have is right; of two equal halves the one with the lowest rank.
        counts = Counter(found.values())
        usual = max(counts, key=lambda digest: (counts[digest], -_first(found, digest)))
        odd = tuple(rank for rank, digest in found.items() if digest != usual)
        if odd:
            others = [rank for rank in found if rank not in odd]
            paths = listed(dict.fromkeys(printable(cards[rank].path) for rank in odd), 2)
            usual_path = printable(cards[others[0]].path)
            where = f"({paths} against {usual_path})" if paths != usual_path else f"({paths})"
            raise RankError(
                f"{in_words(odd)} {words} than {in_words(others)} {where}; every rank ends",
                ranks=odd,
            )


def refuse_different(what: str, found: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RankError, on every rank, if not all of them say the same."""
    first = min(found)
    odd = tuple(rank for rank in found if found[rank] != found[first])
    if odd:
        raise RankError(f"{in_words(odd)} {what} something else than rank {first}", ranks=odd)


def digest(texts: Iterable[str]) -> str:
    """A few characters that are equal for equal texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "backslashreplace"))
        found.update(b"\n")
    return found.hexdigest()[:32]


def refuse_lack_of_memory(cards: Mapping[int, Card]) -> None:
    """Raise MemoryBudgetError, on every rank, if those of one host do not fit there together."""
    hosts: dict[str, list[int]] = {}
    for rank, card in cards.items():
        hosts.setdefault(card.host, []).append(rank)
    for ranks in hosts.values():
        needed = sum(cards[rank].needed_bytes for rank in ranks)
        least = min((cards[rank] for rank in ranks), key=lambda card: card.available_bytes)
        if needed > least.available_bytes:
            raise MemoryBudgetError(
                f"{printable(least.path)}: {in_words(ranks)} on {printable(least.host)} "
                f"{'needs' if len(ranks) == 1 else 'need'} {format_bytes(needed)} in all, but "
                f"{format_bytes(least.available_bytes)} are available ({least.limit} limit); "
                "check_memory=False tries all the same",
                needed_bytes=needed,
                available_bytes=least.available_bytes,
                limit=least.limit,
            )


def in_words(ranks: Mapping[int, object] | list[int] | tuple[int, ...]) -> str:
    """``rank 1``, ``ranks 0, 2, 3``."""
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed(numbers, 16)}"


def _first(found: Mapping[int, str], digest: str) -> int:
    return min(rank for rank, other in found.items() if other == digest)
