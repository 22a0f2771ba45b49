"""Which resource held a load back, told from what it used: pure."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.core.wording import format_bytes
from streamload.measuring.machine import BUSY_CPUS

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


def judge(f: Figures) -> Verdict:
    """What the load waited for most, and the figures that say so."""
    busy, most, whole_s = (f.user_s + f.system_s) / f.total_s, min(f.workers, f.cpus), f.total_s
    used_up = busy >= _CPU_SHARE * most
    cpus = f"it kept {busy:.1f} of {f.cpus} CPUs busy with {f.workers} workers"
    split = (
        f"{_share(f.user_s, f.user_s + f.system_s)} in code of its own (planning, casting, "
        f"turning), {_share(f.system_s, f.user_s + f.system_s)} in the system (fresh memory, "
        "copies out of the page cache)"
    )
    from_disk = _share(f.storage_bytes or 0, f.read_bytes)
    copying, moving = f.copy_bytes_per_s, f.moved_bytes / whole_s

    # Most came from the disk, and the CPUs had time left or reading alone takes as long.
    near_floor = f.floor_read_s is not None and whole_s <= _NEAR_FLOOR * f.floor_read_s
    most_read = f.storage_bytes is not None and f.storage_bytes >= f.read_bytes / 2
    if most_read and (near_floor or not used_up):
        rate = f.floor_read_s and format_bytes(f.read_bytes / f.floor_read_s)
        alone = rate and f" (reading alone: {rate}/s)"
        return Verdict(
            "disk",
            f"{from_disk} of {format_bytes(f.read_bytes)} came from the disk, at "
            f"{format_bytes((f.storage_bytes or 0) / whole_s)}/s{alone or ''}, while {cpus}",
        )
    # Others computed on the CPUs that the load's threads wanted.
    others = f.other_cpus or 0.0
    if others > BUSY_CPUS and busy + others >= _CPU_SHARE * f.cpus and not used_up:
        return Verdict("cpu", f"{cpus}, as other processes took {others:.1f}: {split}")
    if copying is not None and moving >= _MEMORY_SHARE * copying:
        return Verdict(
            "memory bandwidth",
            f"it moved at least {format_bytes(f.moved_bytes)} through memory, "
            f"{format_bytes(moving)}/s, where plain copying reaches {format_bytes(copying)}/s",
        )
    if used_up:
        share = copying and f"; of the memory's bandwidth it needed about {_share(moving, copying)}"
        return Verdict("cpu", f"{cpus}: {split}{share or ''}")
    if most > 1 and busy >= _CPU_SHARE:
        words = "about one thread's worth (planning is one thread's)"
        return Verdict("cpu", f"{cpus}, {words}: {split}")
    return Verdict(
        "none",
        f"neither disk nor memory nor CPU was used up: {cpus}, and {from_disk} came from the disk; "
        "threads waited for each other, or it ended too soon to tell",
    )


def _share(part: float, whole: float) -> str:
    # Readahead fetches a little more than is needed.
    return f"{min(100.0, 100 * part / whole):.0f} %" if whole else "0 %"
