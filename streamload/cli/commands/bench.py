"""``streamload bench PATH``: how fast this machine loads a checkpoint, and how fast it could."""

from __future__ import annotations

from typing import Any

import click

from streamload.cli.render.tables import columns, heading, say_result
from streamload.cli.render.terminal import is_terminal, note
from streamload.cli.shared_options import (
    chunk_bytes_option,
    common_options,
    dtype_option,
    workers_option,
)
from streamload.core.wording import format_bytes, plural, printable

_HEAD = (
    "", "load s", "first use s", "together s", "rate", "of the floor", "peak memory", "held back by"
)  # fmt: skip
# Where there is no room: what the lines below the table say anyway goes first.
_LEFT_OUT = {at: _HEAD[at] for at in (7, 2, 1, 4, 5, 6)}


@click.command(
    "bench",
    epilog="Example: streamload bench ./gpt2-xl --dtype bfloat16 --cold",
    help="""Measure how fast this machine loads the checkpoint at PATH, and how fast it could.

    Each of streamload's modes (stream: contiguous weights, stored: as the file has them, map:
    views of the file) is measured in a process of its own, in turns, with the floor beside them:
    reading alone, and reading and casting into fresh memory with the same threads. Every byte
    loaded is used once, as mapping puts its work off. Says which resource held each mode back.
    """,
)
@click.argument("path")
@dtype_option
@workers_option
@chunk_bytes_option
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="For medians. [default: 3]")
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each.")
@common_options
def command(path: str, as_json: bool, **options: Any) -> None:
    from streamload.measuring.modes import measure

    found = measure(path, **options, tell=_tell)
    say_result(as_json, lambda: found, lambda: "\n".join(_as_text(found)))
    if not found["ok"]:
        raise SystemExit(1)


def _tell(text: str) -> None:
    if is_terminal(err=True):
        note(text)


def _as_text(found: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [_row(f"floor: {name}", row) for name, row in found["floor"].items()]
    rows += [_row(name, row) for name, row in found["modes"].items()]
    first, *others = columns(rows, right=frozenset(range(1, 7)), least={0: 10}, drop=_LEFT_OUT)
    lines = [heading(printable(found["path"])), _setting(found), "", heading(first), *others, ""]
    for name, row in found["modes"].items():
        if row["ok"]:
            lines.append(f"{name}: {row['held_back_by']}: {row['evidence']}.")
    every = {**found["floor"], **found["modes"]}
    lines += [f"{name} failed: {row['reason']}" for name, row in every.items() if not row["ok"]]
    return lines + [f"Note: {note}" for note in found["notes"]]


def _setting(found: dict[str, Any]) -> str:
    machine, cache = found["machine"], found["cache"]
    state = f"page cache {cache['asked']}"
    if not cache["worked"]:
        state = f"page cache NOT {cache['asked']}"
    return (
        f"{format_bytes(found['read_bytes'])} to {found['dtype'] or 'the stored dtype'}, "
        f"{plural(found['workers'], 'worker')}, {plural(found['rounds'], 'round')}, {state} "
        f"({cache['how']}); "
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['filesystem'] or 'file system ?'}, "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    )


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if not row["ok"]:
        return (name, *[""] * 6, "failed")
    low, high = row["total_range_s"]
    reached = row.get("floor_reached")
    return (
        name,
        _seconds(row["load_s"]),
        _seconds(row["first_use_s"]),
        f"{_seconds(row['total_s'])} ({_seconds(low)}-{_seconds(high)})",
        f"{format_bytes(row['bytes_per_s'])}/s",
        "" if reached is None else f"{reached:.0%} of {row['floor']}",
        format_bytes(row["peak_rss_bytes"]),
        row.get("held_back_by", ""),
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
