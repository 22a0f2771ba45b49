"""What each of several ranks would read and need, as a table; and the options that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from streamload.core.wording import format_bytes

if TYPE_CHECKING:
    from streamload.loading.sharding import RankPlan


def refuse_half(shard: str | None, ranks: int | None) -> None:
    """Raise UsageError for one of ``--shard`` and ``--ranks`` without the other."""
    if (shard is None) != (ranks is None):
        raise click.UsageError("--shard and --ranks go together")


def rank_lines(each: Sequence[RankPlan]) -> list[str]:
    """A line for each rank, and one for all of them; none without ranks."""
    if not each:
        return []
    lines = ["", "rank       reads  of it gaps       holds       needs"]
    rows = [(p.bytes_read, p.bytes_unwanted, p.bytes_held, p.needed_bytes) for p in each]
    for rank, sizes in enumerate(rows):
        lines.append(f"{rank:>4}" + "".join(f"{format_bytes(n):>12}" for n in sizes))
    return [
        *lines,
        " all" + "".join(f"{format_bytes(sum(n)):>12}" for n in zip(*rows, strict=True)),
    ]
