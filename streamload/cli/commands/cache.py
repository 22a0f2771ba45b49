"""``streamload cache [list|verify|clear]``."""

from __future__ import annotations

import click

from streamload.cli.render.tables import columns, say_result
from streamload.cli.shared_options import common_options
from streamload.core.wording import format_bytes, plural, printable
from streamload.saving.cache.entries import (
    CacheEntry,
    cache_folder,
    clear_cache,
    list_cache,
    verify_entry,
)
from streamload.saving.cache.trust import folder_fault

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


@click.command("cache", epilog="Example: streamload cache list")
@click.argument(
    "action", type=click.Choice(("list", "verify", "clear")), default="list", metavar="[ACTION]"
)
@common_options
def command(action: str, as_json: bool) -> None:
    """Look after the converted copies that --cache keeps.

    \b
    ACTION is one of:
      list    their sizes, ages and what they were made from (the default)
      verify  read all of them and compare checksums; exits with 1 if one is damaged,
              or if others can write to the folder
      clear   remove all of them
    """  # noqa: D301 - click wants the backspace itself
    entries = clear_cache() if action == "clear" else list_cache()
    problems = []
    if action == "verify":
        fault = folder_fault(cache_folder())
        problems = [fault] if fault else []
        problems += [p for entry in entries for p in verify_entry(entry)]
    say_result(
        as_json,
        lambda: _as_dict(action, entries, problems),
        lambda: "\n".join(_as_text(action, entries, problems)),
    )
    if problems:
        raise SystemExit(1)


def _as_dict(action: str, entries: list[CacheEntry], problems: list[str]) -> dict[str, object]:
    return {
        "ok": not problems,
        "action": action,
        "folder": printable(cache_folder()),
        "entries": [entry.to_dict() for entry in entries],
        "nbytes": sum(entry.nbytes for entry in entries),
        "problems": problems,
    }


def _as_text(action: str, entries: list[CacheEntry], problems: list[str]) -> list[str]:
    nbytes = sum(entry.nbytes for entry in entries)
    total = f"{plural(len(entries), 'entry', 'entries')}, {format_bytes(nbytes)}"
    where = printable(cache_folder())
    if action == "clear":
        return [f"{where}: removed {total}"]
    rows = [_row(entry) for entry in entries]
    lines = [*columns(rows, right=frozenset({0})), f"{where}: {total}"]
    if action == "verify":
        lines += problems or ["all checksums match"]
    return lines


def _row(entry: CacheEntry) -> tuple[str, ...]:
    what = entry.problem or f"{printable(entry.source)} ({entry.dtype or 'mixed'})"
    return format_bytes(entry.nbytes), f"written {_age(entry.to_dict()['age_s'])} ago:", what


def _age(seconds: float) -> str:
    unit, size = next((pair for pair in _UNITS if seconds >= pair[1]), ("second", 1))
    return plural(int(seconds // size), unit)
