"""``streamload cache [list|verify|remove|clear] [WHAT...]``."""

from __future__ import annotations

import os

import click

from streamload.cli.render.tables import columns, say_result
from streamload.cli.shared_options import common_options
from streamload.cli.types import BYTES_OR_NONE
from streamload.core.errors import CheckpointNotFoundError
from streamload.core.wording import format_bytes, plural, printable
from streamload.saving.cache.entries import (
    CacheEntry,
    cache_folder,
    clear_cache,
    list_cache,
    verify_entry,
)
from streamload.saving.cache.limit import cache_limit, set_cache_limit
from streamload.saving.cache.trust import folder_fault

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))
_LEAST_ID = 4
_HEAD = ("id", "size", "used", "written", "made from")


@click.command("cache", epilog="Example: streamload cache --max-bytes 50GiB")
@click.argument(
    "action",
    type=click.Choice(("list", "verify", "remove", "clear")),
    default="list",
    metavar="[ACTION]",
)
@click.argument("what", nargs=-1, metavar="[WHAT]...")
@click.option(
    "--max-bytes",
    type=BYTES_OR_NONE,
    help="Keep the cache under this size from now on, or none. What was used longest ago goes.",
)
@common_options
def command(action: str, what: tuple[str, ...], max_bytes: int | str | None, as_json: bool) -> None:
    """Look after the converted copies that --cache keeps.

    \b
    ACTION is one of:
      list    sizes, ages, what from and how (the default)
      verify  read all and compare their checksums
      remove  remove those of WHAT: ids or checkpoints
      clear   remove all of them

    WHAT chooses for list and verify, too. verify exits with 1 if a copy is damaged, or if others
    can write to the folder. The folder is $STREAMLOAD_CACHE, else "streamload" in the
    user's folder for caches.
    """  # noqa: D301 - click wants the backspace itself
    if bool(what) != (action == "remove") and action in ("remove", "clear"):
        raise click.UsageError("remove needs an id or a checkpoint; clear removes everything")
    removed: list[CacheEntry] = []
    if max_bytes is not None:
        removed += set_cache_limit(max_bytes if isinstance(max_bytes, int) else None)
    entries = _chosen(list_cache(), what)
    problems: list[str] = []
    if action in ("remove", "clear"):
        removed += clear_cache(entries)
        entries = list_cache()
    elif action == "verify":
        fault = folder_fault(cache_folder())
        problems = [fault] if fault else []
        problems += [p for entry in entries for p in verify_entry(entry)]
    say_result(
        as_json,
        lambda: _as_dict(action, entries, removed, problems),
        lambda: "\n".join(_as_text(action, entries, removed, problems)),
    )
    if problems:
        raise SystemExit(1)


def _chosen(entries: list[CacheEntry], what: tuple[str, ...]) -> list[CacheEntry]:
    """The entries that are meant, all without ``what``.

    Raises:
        CheckpointNotFoundError: one of them means none.
    """
    if not what:
        return entries
    found: dict[str, CacheEntry] = {}
    for given in what:
        meant = [entry for entry in entries if _is_meant(entry, given)]
        if not meant:
            raise CheckpointNotFoundError(
                "no copy in the cache has this id, or was made from it; `streamload cache` lists "
                f"the {plural(len(entries), 'copy', 'copies')} there",
                path=given,
            )
        ids = {entry.id for entry in meant if entry.id.startswith(given.lower())} - {given.lower()}
        if len(ids) > 1:
            raise click.UsageError(
                f"{printable(given)!r} begins several ids: {', '.join(sorted(ids))}"
            )
        found.update((entry.path, entry) for entry in meant)
    return list(found.values())


def _is_meant(entry: CacheEntry, given: str) -> bool:
    if len(given) >= _LEAST_ID and entry.id.startswith(given.lower()):
        return True
    path = printable(os.path.abspath(given))
    return given in (entry.path, entry.source) or path in (entry.path, entry.source)


def _as_dict(
    action: str, entries: list[CacheEntry], removed: list[CacheEntry], problems: list[str]
) -> dict[str, object]:
    # Of clear and remove the entries have always been those that went.
    shown = removed if action in ("remove", "clear") else entries
    return {
        "ok": not problems,
        "action": action,
        "folder": printable(cache_folder()),
        "entries": [entry.to_dict() for entry in shown],
        "nbytes": sum(entry.nbytes for entry in shown),
        "max_bytes": cache_limit(),
        "removed": [entry.to_dict() for entry in removed],
        "problems": problems,
    }


def _as_text(
    action: str, entries: list[CacheEntry], removed: list[CacheEntry], problems: list[str]
) -> list[str]:
    where, limit = printable(cache_folder()), cache_limit()
    lines = []
    if removed or action in ("remove", "clear"):
        lines.append(f"{where}: removed {_total(removed)}")
    if action in ("remove", "clear"):
        return lines
    if entries:
        rows = [_HEAD, *map(_row, entries)]
        lines += columns(rows, right=frozenset({1}), least={4: 16}, drop={3: "written", 2: "used"})
    of_most = "" if limit is None else f" of at most {format_bytes(limit)}"
    lines.append(f"{where}: {_total(entries)}{of_most}")
    if action == "verify":
        lines += problems or ["all checksums match"]
    return lines


def _total(entries: list[CacheEntry]) -> str:
    nbytes = sum(entry.nbytes for entry in entries)
    return f"{plural(len(entries), 'entry', 'entries')}, {format_bytes(nbytes)}"


def _row(entry: CacheEntry) -> tuple[str, ...]:
    facts = entry.to_dict()
    how = ", ".join((entry.dtype or "mixed", *entry.made_with))
    what = entry.problem or f"{printable(entry.source)} ({how})"
    used, written = (f"{_age(facts[key])} ago" for key in ("unused_s", "age_s"))
    return entry.id, format_bytes(entry.nbytes), used, written, what


def _age(seconds: float) -> str:
    unit, size = next((pair for pair in _UNITS if seconds >= pair[1]), ("second", 1))
    return plural(int(seconds // size), unit)
