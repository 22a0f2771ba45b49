"""What a load, or computing with what it loads, will be slow at, and why."""

from __future__ import annotations

from streamload.core.report import LoadReport
from streamload.system.filesystems import filesystem_of, is_network


def slow_notes(path: str, report: LoadReport) -> list[str]:
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
    kind = None if "://" in path else filesystem_of(path)
    if kind is not None and is_network(kind):
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
