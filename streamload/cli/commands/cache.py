"""``streamload cache [list|verify|clear]``."""

from __future__ import annotations

import json

import click

from streamload.cli.options import common_options
from streamload.cli.render.tables import columns, say
from streamload.core.errors import printable
from streamload.core.report import format_bytes
from streamload.saving.cache.entries import (
    CacheEntry,
    cache_folder,
    clear_cache,
    list_cache,
    verify_entry,
)

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
      verify  read all of them and compare checksums; exits with 1 if one is damaged
      clear   remove all of them
    """  # noqa: D301 - click wants the backspace itself
    entries = clear_cache() if action == "clear" else list_cache()
    problems = [p for entry in entries for p in verify_entry(entry)] if action == "verify" else []
    if as_json:
        say(json.dumps(_as_dict(action, entries, problems)))
    else:
        say("\n".join(_as_text(action, entries, problems)))
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
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    total = f"{count}, {format_bytes(sum(entry.nbytes for entry in entries))}"
    where = printable(cache_folder())
    if action == "clear":
        return [f"{where}: removed {total}"]
    rows = [_row(entry) for entry in entries]
    lines = [*columns(rows, right=frozenset({0})), f"{where}: {total}"]
    if action == "verify":
        lines += problems or ["all checksums fit"]
    return lines


def _row(entry: CacheEntry) -> tuple[str, ...]:
    facts = entry.to_dict()
    what = entry.problem or f"{printable(entry.source)} ({entry.dtype or 'mixed'})"
    return format_bytes(entry.nbytes), f"written {_age(facts['age_s'])} ago:", what


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "1 second" if int(seconds) == 1 else f"{int(seconds)} seconds"
