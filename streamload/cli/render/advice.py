"""What a person would want to know before a load: what would fit, what will be slow and why."""

from __future__ import annotations

import os

from streamload.core.report import LoadReport, format_bytes

__all__ = ["slow_notes", "smaller_ways"]

_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs", "drvfs")


def smaller_ways(report: LoadReport) -> list[str]:
    """Options with which the load would need less, those that would be enough first."""
    memory, ways = report.memory, []
    wide = {"float32", "float64"} & {entry.dtype for entry in report.loaded}
    if wide:
        half = memory.needed_bytes // (4 if wide == {"float64"} else 2)
        if half <= memory.available_bytes:
            ways.append(f"--dtype bfloat16 (about {format_bytes(half)})")
    if report.mode == "stream" and report.device == "cpu":
        ways.append("--mode map (views of the file; works for files larger than memory)")
    if report.loaded and memory.available_bytes:
        share = memory.available_bytes / memory.needed_bytes
        ways.append(f"--layers with about {share:.0%} of the blocks")
    return ways


def slow_notes(path: str, report: LoadReport) -> list[str]:
    """What will be slow, loading or computing, and why."""
    notes = []
    dtypes = {entry.dtype for entry in report.loaded}
    transposed = any("transpose" in entry.transform for entry in report.loaded)
    on_cpu = report.device == "cpu"
    if on_cpu and "bfloat16" in dtypes and not _cpu_computes_bfloat16():
        notes.append("this CPU has no bfloat16 instructions: computing is slower than in float32")
        if report.layout == "stored" and transposed:
            notes.append("bfloat16 products with weights kept in the stored (transposed) layout")
    if on_cpu and "float16" in dtypes:
        notes.append("float16 on a CPU: bfloat16 or float32 compute faster")
    kind = _file_system(path)
    if kind is not None and kind.startswith(_NETWORK):
        mapped = "; --mode map reads it page by page" if report.mode == "map" else ""
        notes.append(f"the file is on a network disk ({kind}){mapped}")
    return notes


def _cpu_computes_bfloat16() -> bool:
    """True unless the CPU is known to lack it; only Linux on x86 tells."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return True
    return not flags or "avx512_bf16" in flags or "amx_bf16" in flags


def _file_system(path: str) -> str | None:
    """The kind of the file system that holds ``path``, where /proc tells."""
    real = os.path.realpath(path)
    best, kind = "", None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, mount, name, *_ = line.split()
                mount = mount.replace("\\040", " ")
                inside = real == mount or real.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best):
                    best, kind = mount, name
    except OSError:
        return None
    return kind
