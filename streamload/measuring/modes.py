"""``streamload bench``: streamload's modes and the floor on one checkpoint, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.measuring.machine import cpu_model, filesystem_of, usable_cpus
from streamload.measuring.own_peers import COPY, FLOORS, MODES
from streamload.measuring.peers import Job
from streamload.measuring.rounds import disturbances, in_turns, measure_load, medians, set_cache
from streamload.measuring.survey import Survey, survey
from streamload.measuring.verdict import Figures, judge
from streamload.system.memory import available_memory

__all__ = ["Asked", "measure"]

_SMALL_BYTES = 64 << 20
_NOT_WARM = 0.99
_TIMEOUT_S = 3600.0
_MEDIANS = (
    "load_s", "first_use_s", "total_s", "user_s", "system_s", "storage_bytes", "touched_bytes",
    "written_bytes", "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes", "other_cpus",
    "copy_bytes_per_s",
)  # fmt: skip
_KEPT_OUT = ("import_s", "values", "trace")
"""What the runner measures and this report does not list."""


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
    job = Job(
        asked.path,
        asked.dtype,
        workers,
        chunk_bytes=asked.chunk_bytes,
        tensors=found.why_no_model is not None,
    )
    peers = {"copy": COPY, **{peer.name: peer for peer in FLOORS.values()}, **MODES}
    shown = {peer.name: name for name, peer in FLOORS.items()}
    taken: list[dict[str, Any]] = []
    for number, what in in_turns(list(peers), asked.rounds):
        tell(f"round {number} of {asked.rounds}: {shown.get(what, what)}")
        line = {"round": number, "what": what, "cache_problem": None, "resident_before": None}
        if what != "copy":
            line |= set_cache(found.files, cold=asked.cold)
        figures = measure_load(peers[what], job, timeout_s=_TIMEOUT_S, grouped=False)
        line |= {key: value for key, value in figures.items() if key not in _KEPT_OUT}
        taken.append(line)
    rows = {what: medians([t for t in taken if t["what"] == what], _MEDIANS) for what in peers}
    floors = {name: rows[peer.name] for name, peer in FLOORS.items()}
    modes = {mode: rows[mode] for mode in MODES}
    copy_bytes_per_s = rows["copy"].get("copy_bytes_per_s")
    judged = _Judged(found, workers, floors, copy_bytes_per_s)
    return {
        "ok": any(row["ok"] for row in modes.values()),
        "path": asked.path,
        "dtype": asked.dtype,
        "workers": workers,
        "rounds": asked.rounds,
        "read_bytes": found.read_bytes,
        "cache": _cache(asked, taken),
        "machine": _machine(found),
        "copy_bytes_per_s": copy_bytes_per_s,
        "floor": {name: _row(row, found) for name, row in floors.items()},
        "modes": {mode: judged.row(row) for mode, row in modes.items()},
        "notes": _notes(asked, found, taken) + _unmapped(modes),
        "measurements": taken,
    }


def _row(median: dict[str, Any], found: Survey) -> dict[str, Any]:
    if not median["ok"]:
        return median
    keys = ("copy_bytes_per_s", "user_s", "system_s", "touched_bytes", "other_cpus")
    kept = {key: value for key, value in median.items() if key not in keys}
    return kept | {"bytes_per_s": found.read_bytes / median["total_s"]}


@dataclass(frozen=True)
class _Judged:
    """Rows of modes beside the floors: the fraction reached, and what held each one back."""

    found: Survey
    workers: int
    floors: dict[str, dict[str, Any]]
    copy_bytes_per_s: float | None

    def row(self, median: dict[str, Any]) -> dict[str, Any]:
        if not median["ok"]:
            return median
        # What maps everything needs no memory of its own: its floor is reading alone.
        maps_all = median["written_bytes"] == 0
        name = "read" if maps_all else "read + cast"
        floor, read = self.floors[name], self.floors["read"]
        # Once out of the page cache; where memory is the load's own, zeroed by the system,
        # written, and read again by the first use.
        own_bytes = 0 if maps_all else 3 * int(median["touched_bytes"])
        verdict = judge(
            Figures(
                total_s=median["total_s"],
                user_s=median["user_s"],
                system_s=median["system_s"],
                read_bytes=self.found.read_bytes,
                storage_bytes=median["storage_bytes"],
                moved_bytes=self.found.read_bytes + own_bytes,
                floor_read_s=read["total_s"] if read["ok"] else None,
                copy_bytes_per_s=self.copy_bytes_per_s,
                workers=self.workers,
                cpus=usable_cpus(),
                other_cpus=median["other_cpus"],
            )
        )
        return _row(median, self.found) | {
            "floor": name,
            "floor_reached": floor["total_s"] / median["total_s"] if floor["ok"] else None,
            "held_back_by": verdict.resource,
            "evidence": verdict.evidence,
        }


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


def _unmapped(modes: dict[str, dict[str, Any]]) -> list[str]:
    """Said where the row "map" is a streamed load: nothing could be mapped."""
    written = [modes[mode].get("written_bytes") for mode in ("stream", "map")]
    if None in written or not written[1] or written[1] < written[0]:
        return []  # not known where tensors alone were loaded, or a measurement failed
    return ["map: nothing could be mapped as it is stored (cast or re-laid): all was streamed."]


def _notes(asked: Asked, found: Survey, taken: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know about how the figures came about."""
    cache, notes = _cache(asked, taken), []
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
