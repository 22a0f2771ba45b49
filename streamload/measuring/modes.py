"""``streamload bench``: streamload's modes and the floor on one checkpoint, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamload.core.options import MOST_WORKERS, usable_cpus
from streamload.measuring.machine import describe
from streamload.measuring.own_peers import COPY, FLOORS, MODES
from streamload.measuring.peers import Job
from streamload.measuring.rounds import disturbances, in_turns, measure_load, medians, set_cache
from streamload.measuring.survey import Survey, survey
from streamload.measuring.verdict import Figures, judge

_SMALL_BYTES = 64 << 20
_NOT_WARM = 0.99
_TIMEOUT_S = 3600.0
_MEDIANS = (
    "load_s", "first_use_s", "total_s", "user_s", "system_s", "storage_bytes", "touched_bytes",
    "written_bytes", "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "other_cpus",
    "copy_bytes_per_s",
)  # fmt: skip
_JUDGED = ("total_s", "user_s", "system_s", "storage_bytes", "other_cpus")
_UNLISTED = ("import_s", "values", "trace")
"""What the runner measures and this report does not list."""


def measure(
    path: str,
    *,
    dtype: str | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    rounds: int = 3,
    cold: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure everything; returns what ``streamload bench --json`` prints.

    ``path`` and ``dtype`` are as for ``streamload.load``. The files are dropped from the page
    cache before each measurement if ``cold``, otherwise read into it. ``tell`` is called with a
    line before each.

    Raises:
        CheckpointError, PlanError: as ``streamload.load``; nothing is measured then.
    """
    import torch

    import streamload

    versions = {"streamload": streamload.__version__, "torch": torch.__version__}
    found = survey(path, dtype=dtype)
    workers = workers or min(usable_cpus(), MOST_WORKERS)
    tensors = found.why_no_model is not None
    job = Job(path, dtype, workers, chunk_bytes=chunk_bytes, tensors=tensors)
    peers = {"copy": COPY, **{peer.name: peer for peer in FLOORS.values()}, **MODES}
    shown = {peer.name: name for name, peer in FLOORS.items()}
    taken: list[dict[str, Any]] = []
    for number, what in in_turns(list(peers), rounds):
        tell(f"round {number} of {rounds}: {shown.get(what, what)}")
        line = {"round": number, "what": what, "cache_problem": None, "resident_before": None}
        if what != "copy":
            line |= set_cache(found.files, cold=cold)
        figures = measure_load(peers[what], job, timeout_s=_TIMEOUT_S, grouped=False)
        line |= {key: value for key, value in figures.items() if key not in _UNLISTED}
        taken.append(line)
    rows = {what: medians([t for t in taken if t["what"] == what], _MEDIANS) for what in peers}
    cache = _cache(taken, cold=cold)
    modes = {mode: _mode(rows[mode], rows, found, workers) for mode in MODES}
    return {
        "ok": any(row["ok"] for row in modes.values()),
        "path": path,
        "dtype": dtype,
        "workers": workers,
        "rounds": rounds,
        "read_bytes": found.read_bytes,
        "cache": cache,
        "machine": describe(found.files[0] if found.files else None) | {"versions": versions},
        "copy_bytes_per_s": rows["copy"].get("copy_bytes_per_s"),
        "floor": {name: _row(rows[peer.name], found) for name, peer in FLOORS.items()},
        "modes": modes,
        "notes": _notes(cache, found, taken) + _unmapped(modes),
        "measurements": taken,
    }


def _row(median: dict[str, Any], found: Survey) -> dict[str, Any]:
    if not median["ok"]:
        return median
    keys = ("copy_bytes_per_s", "user_s", "system_s", "touched_bytes", "other_cpus")
    kept = {key: value for key, value in median.items() if key not in keys}
    return kept | {"bytes_per_s": found.read_bytes / median["total_s"]}


def _mode(
    median: dict[str, Any], rows: dict[str, dict[str, Any]], found: Survey, workers: int
) -> dict[str, Any]:
    """A mode's row: with the fraction of its floor, and what held it back."""
    if not median["ok"]:
        return median
    # What maps everything needs no memory of its own: its floor is reading alone.
    maps_all = median["written_bytes"] == 0
    name = "read" if maps_all else "read + cast"
    floor, read = rows[FLOORS[name].name], rows[FLOORS["read"].name]
    # Once out of the page cache; where memory is the load's own, zeroed by the system, written,
    # and read again by the first use.
    moved_bytes = found.read_bytes + (0 if maps_all else 3 * int(median["touched_bytes"]))
    verdict = judge(
        Figures(
            read_bytes=found.read_bytes,
            moved_bytes=moved_bytes,
            floor_read_s=read["total_s"] if read["ok"] else None,
            copy_bytes_per_s=rows["copy"].get("copy_bytes_per_s"),
            workers=workers,
            cpus=usable_cpus(),
            **{key: median[key] for key in _JUDGED},
        )
    )
    return _row(median, found) | {
        "floor": name,
        "floor_reached": floor["total_s"] / median["total_s"] if floor["ok"] else None,
        "held_back_by": verdict.resource,
        "evidence": verdict.evidence,
    }


def _cache(taken: Sequence[dict[str, Any]], *, cold: bool) -> dict[str, Any]:
    loads = [t for t in taken if t["what"] != "copy"]
    inside = [t["resident_before"] for t in loads]
    problems = sorted({t["cache_problem"] for t in loads if t["cache_problem"]})
    known = None not in inside
    return {
        "asked": "cold" if cold else "warm",
        "how": "posix_fadvise(POSIX_FADV_DONTNEED)" if cold else "files read beforehand",
        "worked": not problems and (cold or not known or min(inside) >= _NOT_WARM),
        "problem": "; ".join(problems) or None,
        "resident_before": [min(inside), max(inside)] if known else None,
    }


def _unmapped(modes: dict[str, dict[str, Any]]) -> list[str]:
    """Said where the row "map" is a streamed load: nothing could be mapped."""
    written = [modes[mode].get("written_bytes") for mode in ("stream", "map")]
    if None in written or not written[1] or written[1] < written[0]:
        return []  # not known where tensors alone were loaded, or a measurement failed
    return ["map: nothing could be mapped as it is stored (cast or re-laid): all was streamed."]


def _notes(cache: dict[str, Any], found: Survey, taken: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    notes = []
    if cache["problem"]:
        notes.append(f"The page cache could not be dropped: {cache['problem']}.")
    elif not cache["worked"]:
        notes.append(
            f"Only {cache['resident_before'][0]:.0%} of the files stayed in the page cache: "
            "the rest came from the disk."
        )
    notes += disturbances(taken, usable_cpus())
    if found.read_bytes < _SMALL_BYTES:
        notes.append("A small checkpoint: opening and planning take most of such a load.")
    if found.why_no_model is not None:
        notes.append(f"Tensors alone were loaded, without a model: {found.why_no_model}.")
    if found.left_out:
        notes.append(
            f"{len(found.left_out)} tensors cannot be read in blocks; the floor is without them."
        )
    return notes
