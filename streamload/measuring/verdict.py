"""Which resource held a load back, told from what it used: pure."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.measuring.machine import BUSY_CPUS

__all__ = ["Figures", "Verdict", "judge"]

# Shares from which on a resource is called used up. Copying and casting never reach the rate of
# a plain copy loop, and threads wait for each other at both ends of a load.
_MEMORY_SHARE = 0.6
_CPU_SHARE = 0.75
_NEAR_FLOOR = 1.25


@dataclass(frozen=True)
class Figures:
    """One way to load, medians of its rounds; seconds and bytes.

    Attributes:
        total_s: load and first use.
        user_s, system_s: CPU seconds of all its threads in that time.
        read_bytes: what it needs of the files; ``storage_bytes``: what came from disks for it.
        moved_bytes: through memory at least: read and written.
        floor_read_s: reading the same bytes and doing nothing with them.
        copy_bytes_per_s: what plain copying moves, with as many workers.
        other_cpus: CPUs that other processes used meanwhile.
    """

    total_s: float
    user_s: float
    system_s: float
    read_bytes: int
    storage_bytes: int | None
    moved_bytes: int
    floor_read_s: float | None
    copy_bytes_per_s: float | None
    workers: int
    cpus: int
    other_cpus: float | None = None


@dataclass(frozen=True)
class Verdict:
    """``resource`` is ``"disk"``, ``"memory bandwidth"``, ``"cpu"`` or ``"none"``."""

    resource: str
    evidence: str


def judge(figures: Figures) -> Verdict:
    """What the load waited for most, and the figures that say so."""
    return (
        _disk(figures)
        or _starved(figures)
        or _memory(figures)
        or _cpu(figures)
        or Verdict(
            "none",
            f"neither disk nor memory nor CPU was used up: {_cpus(figures)}, and "
            f"{_share(figures.storage_bytes or 0, figures.read_bytes)} came from the disk; "
            "threads waited for each other, or it ended too soon to tell",
        )
    )


def _disk(f: Figures) -> Verdict | None:
    """Most of the bytes came from the disk, and the CPUs had time left or reading took as long."""
    if f.storage_bytes is None or f.storage_bytes < f.read_bytes / 2:
        return None
    near = f.floor_read_s is not None and f.total_s <= _NEAR_FLOOR * f.floor_read_s
    if not near and _busy(f) >= _CPU_SHARE * _most(f):
        return None
    said = (
        f"{_share(f.storage_bytes, f.read_bytes)} of {_gb(f.read_bytes)} came from the disk, at "
        f"{_gb(f.storage_bytes / f.total_s)}/s"
    )
    if f.floor_read_s is not None:
        said += f" (reading alone: {_gb(f.read_bytes / f.floor_read_s)}/s)"
    return Verdict("disk", f"{said}, while {_cpus(f)}")


def _memory(f: Figures) -> Verdict | None:
    if f.copy_bytes_per_s is None or f.moved_bytes / f.total_s < _MEMORY_SHARE * f.copy_bytes_per_s:
        return None
    return Verdict(
        "memory bandwidth",
        f"it moved at least {_gb(f.moved_bytes)} through memory, "
        f"{_gb(f.moved_bytes / f.total_s)}/s, where plain copying reaches "
        f"{_gb(f.copy_bytes_per_s)}/s",
    )


def _starved(f: Figures) -> Verdict | None:
    """Others computed on the CPUs that the load's threads wanted."""
    others = f.other_cpus or 0.0
    if others <= BUSY_CPUS or _busy(f) + others < _CPU_SHARE * f.cpus:
        return None
    if _busy(f) >= _CPU_SHARE * _most(f):
        return None
    return Verdict("cpu", f"{_cpus(f)}, as other processes took {others:.1f}: {_split(f)}")


def _cpu(f: Figures) -> Verdict | None:
    if _busy(f) >= _CPU_SHARE * _most(f):
        return Verdict("cpu", f"{_cpus(f)}: {_split(f)}{_at_memory(f)}")
    if _most(f) > 1 and _busy(f) >= _CPU_SHARE:
        return Verdict(
            "cpu", f"{_cpus(f)}, about one thread's worth (planning is one thread's): {_split(f)}"
        )
    return None


def _busy(f: Figures) -> float:
    return (f.user_s + f.system_s) / f.total_s


def _most(f: Figures) -> int:
    return min(f.workers, f.cpus)


def _cpus(f: Figures) -> str:
    return f"it kept {_busy(f):.1f} of {f.cpus} CPUs busy with {f.workers} workers"


def _split(f: Figures) -> str:
    whole = f.user_s + f.system_s
    return (
        f"{_share(f.user_s, whole)} in code of its own (planning, casting, turning), "
        f"{_share(f.system_s, whole)} in the system (fresh memory, copies out of the page cache)"
    )


def _at_memory(f: Figures) -> str:
    if f.copy_bytes_per_s is None:
        return ""
    share = _share(f.moved_bytes / f.total_s, f.copy_bytes_per_s)
    return f"; of the memory's bandwidth it needed about {share}"


def _share(part: float, whole: float) -> str:
    # Readahead fetches a little more than is needed.
    return f"{min(100.0, 100 * part / whole):.0f} %" if whole else "0 %"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"
