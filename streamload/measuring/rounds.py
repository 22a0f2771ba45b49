"""Streamload's modes and the floor on one checkpoint, in rounds, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.measuring import page_cache
from streamload.measuring.child import MODES
from streamload.measuring.machine import BUSY_CPUS, cpu_model, filesystem_of, usable_cpus
from streamload.measuring.survey import Survey, survey
from streamload.measuring.verdict import Figures, judge
from streamload.measuring.watch import watch_process
from streamload.system.memory import available_memory

__all__ = ["Asked", "FLOORS", "measure"]

FLOORS = {"floor_read": "read", "floor_cast": "read + cast"}
_SMALL_BYTES = 64 << 20
_STOLEN_CPUS = 0.05
_NOT_WARM = 0.99
_TIMEOUT_S = 3600.0
_MEDIANS = (
    "load_s", "first_use_s", "total_s", "user_s", "system_s", "storage_bytes", "touched_bytes",
    "written_bytes", "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "other_cpus",
    "copy_bytes_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is to be measured.

    Attributes:
        path: a checkpoint, as ``streamload.load`` takes it.
        dtype: torch's name of what floats are cast to; None keeps the stored ones.
        rounds: how often each is measured.
        cold: drop the files from the page cache before each; otherwise read them into it.
    """

    path: str
    dtype: str | None = None
    workers: int | None = None
    chunk_bytes: int | None = None
    rounds: int = 3
    cold: bool = False


def measure(asked: Asked, *, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure everything; returns what ``streamload bench --json`` prints.

    Args:
        asked: what.
        tell: called with a line before each measurement.

    Raises:
        CheckpointError, PlanError: as ``streamload.load``; nothing is measured then.
    """
    found = survey(asked.path, dtype=asked.dtype)
    workers = asked.workers or min(usable_cpus(), 8)
    things = ["copy", *FLOORS, *MODES]
    taken: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        # Another order every round, so that none always follows the same one.
        shift = number * len(things) // asked.rounds
        for what in things[shift:] + things[:shift]:
            tell(f"round {number + 1} of {asked.rounds}: {FLOORS.get(what, what)}")
            taken.append({"round": number + 1, **_once(what, asked, workers, found)})
    medians = {what: _median([t for t in taken if t["what"] == what]) for what in things}
    return {
        "ok": any(medians[mode]["ok"] for mode in MODES),
        "path": asked.path,
        "dtype": asked.dtype,
        "workers": workers,
        "rounds": asked.rounds,
        "read_bytes": found.read_bytes,
        "cache": _cache(asked, taken),
        "machine": _machine(found),
        "copy_bytes_per_s": medians["copy"].get("copy_bytes_per_s"),
        "floor": {name: _row(medians[what], found) for what, name in FLOORS.items()},
        "modes": {mode: _mode(mode, medians, found, workers) for mode in MODES},
        "notes": _notes(asked, found, taken) + _unmapped(medians),
        "measurements": taken,
    }


def _once(what: str, asked: Asked, workers: int, found: Survey) -> dict[str, Any]:
    """One measurement, flat as JSON has it."""
    problem, resident = None, None
    if what != "copy":
        problem = page_cache.make(found.files, cold=asked.cold)
        resident = page_cache.resident_fraction(found.files)
    order = {
        "do": what,
        "path": asked.path,
        "workers": workers,
        "dtype": asked.dtype,
        "chunk_bytes": asked.chunk_bytes,
        "tensors": found.why_no_model is not None,
    }
    watch = watch_process(
        [sys.executable, "-m", "streamload.measuring.child", json.dumps(order)],
        timeout_s=_TIMEOUT_S,
        environment=_environment(),
    )
    used = {key: value for key, value in watch.event("used").items() if key != "event"}
    made = {"what": what, "cache_problem": problem, "resident_before": resident}
    if watch.failure is not None or not used:
        return made | {"ok": False, "reason": watch.failure or "ended early"}
    return made | {
        "ok": True,
        "reason": None,
        "total_s": used["load_s"] + used["first_use_s"],
        **used,
        **watch.peaks,
        "other_cpus": watch.other_cpus,
        "stolen_cpus": watch.stolen_cpus,
    }


def _environment() -> dict[str, str]:
    """This process's, with the way to this package where it is not installed."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(home) in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = filter(None, [os.environ.get("PYTHONPATH"), home])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _median(taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds; a failure in any of them is the whole row's."""
    reason = next((t["reason"] for t in taken if not t["ok"]), None)
    if reason is not None:
        return {"ok": False, "reason": reason}
    made: dict[str, Any] = {"ok": True, "reason": None}
    for key in _MEDIANS:
        values = [t.get(key) for t in taken]
        known = [value for value in values if value is not None]
        made[key] = statistics.median(known) if len(known) == len(values) else None
    totals = [t["total_s"] for t in taken]
    return made | {"total_range_s": [min(totals), max(totals)]}


def _row(median: dict[str, Any], found: Survey) -> dict[str, Any]:
    if not median["ok"]:
        return median
    keys = ("copy_bytes_per_s", "user_s", "system_s", "touched_bytes", "other_cpus")
    kept = {key: value for key, value in median.items() if key not in keys}
    return kept | {"bytes_per_s": found.read_bytes / median["total_s"]}


def _mode(
    mode: str, medians: dict[str, dict[str, Any]], found: Survey, workers: int
) -> dict[str, Any]:
    """A mode's row: with the fraction of its floor, and what held it back."""
    median = medians[mode]
    if not median["ok"]:
        return median
    # What maps everything needs no memory of its own: its floor is reading alone.
    maps_all = median["written_bytes"] == 0
    which = "floor_read" if maps_all else "floor_cast"
    floor = medians[which]
    reached = floor["total_s"] / median["total_s"] if floor["ok"] else None
    verdict = judge(_figures(median, medians, found, workers, maps_all=maps_all))
    return _row(median, found) | {
        "floor": FLOORS[which],
        "floor_reached": reached,
        "held_back_by": verdict.resource,
        "evidence": verdict.evidence,
    }


def _figures(
    median: dict[str, Any],
    medians: dict[str, dict[str, Any]],
    found: Survey,
    workers: int,
    *,
    maps_all: bool,
) -> Figures:
    read = medians["floor_read"]
    # Once out of the page cache; where memory is the load's own, zeroed by the system, written,
    # and read again by the first use.
    moved = found.read_bytes + (0 if maps_all else 3 * int(median["touched_bytes"]))
    return Figures(
        total_s=median["total_s"],
        user_s=median["user_s"],
        system_s=median["system_s"],
        read_bytes=found.read_bytes,
        storage_bytes=median["storage_bytes"],
        moved_bytes=moved,
        floor_read_s=read["total_s"] if read["ok"] else None,
        copy_bytes_per_s=medians["copy"].get("copy_bytes_per_s"),
        workers=workers,
        cpus=usable_cpus(),
        other_cpus=median["other_cpus"],
    )


def _cache(asked: Asked, taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    loads = [t for t in taken if t["what"] != "copy"]
    inside = [t["resident_before"] for t in loads]
    problems = sorted({t["cache_problem"] for t in loads if t["cache_problem"]})
    known = None not in inside
    return {
        "asked": "cold" if asked.cold else "warm",
        "how": "posix_fadvise(POSIX_FADV_DONTNEED)" if asked.cold else "files read beforehand",
        "worked": not problems and (asked.cold or not known or min(inside) >= _NOT_WARM),
        "problem": "; ".join(problems) or None,
        "resident_before": [min(inside), max(inside)] if known else None,
    }


def _machine(found: Survey) -> dict[str, Any]:
    import torch

    import streamload

    room = available_memory()
    return {
        "cpu": cpu_model(),
        "cpus": usable_cpus(),
        "available_bytes": room.bytes,
        "filesystem": filesystem_of(found.files[0]) if found.files else None,
        "versions": {"streamload": streamload.__version__, "torch": torch.__version__},
    }


def _unmapped(medians: dict[str, dict[str, Any]]) -> list[str]:
    """Said where the row "map" is a streamed load: nothing could be mapped."""
    written = [medians[mode].get("written_bytes") for mode in ("stream", "map")]
    if None in written or not written[1] or written[1] < written[0]:
        return []  # not known where tensors alone were loaded, or a measurement failed
    return ["map: nothing could be mapped as it is stored (cast or re-laid): all was streamed."]


def _notes(asked: Asked, found: Survey, taken: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    cache, good, notes = _cache(asked, taken), [t for t in taken if t["ok"]], []
    if cache["problem"]:
        notes.append(f"The page cache could not be dropped: {cache['problem']}.")
    elif not cache["worked"]:
        notes.append(
            f"Only {cache['resident_before'][0]:.0%} of the files stayed in the page cache: "
            "the rest came from the disk."
        )
    others = [t["other_cpus"] for t in good if t["other_cpus"] is not None]
    busy = [cpus for cpus in others if cpus > BUSY_CPUS]
    if busy:
        notes.append(
            f"The machine was busy: in {len(busy)} of {len(others)} measurements other processes "
            f"used up to {max(busy):.1f} of {usable_cpus()} CPUs."
        )
    if max((t["stolen_cpus"] or 0.0 for t in good), default=0.0) > _STOLEN_CPUS:
        notes.append("The host took CPU time away (steal time).")
    if good and not others:
        notes.append("Whether other processes were computing is not known on this system.")
    if found.read_bytes < _SMALL_BYTES:
        notes.append("A small checkpoint: opening and planning take most of such a load.")
    if found.why_no_model is not None:
        notes.append(f"Tensors alone were loaded, without a model: {found.why_no_model}.")
    if found.left_out:
        notes.append(
            f"{len(found.left_out)} tensors cannot be read in blocks; the floor is without them."
        )
    return notes
