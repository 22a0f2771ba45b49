"""What each of several ranks would read and need, as a table; and the options that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from streamload.cli.render.tables import columns
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
    sizes = [(p.bytes_read, p.bytes_unwanted, p.bytes_held, p.needed_bytes) for p in each]
    rows: list[tuple[str, ...]] = [("rank", "reads", "of it gaps", "holds", "needs")]
    rows += [(str(rank), *map(format_bytes, one)) for rank, one in enumerate(sizes)]
    rows.append(("all", *map(format_bytes, map(sum, zip(*sizes, strict=True)))))
    return ["", *columns(rows, right=frozenset(range(5)), drop={2: "gaps", 4: "needs"})]
