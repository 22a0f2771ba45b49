"""Planted figures: an ordinary run, and those that pictures and page could stumble over."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
HEAD: dict[str, Any] = {
    "kind": "run", "command": "compare", "path": "gpt2", "dtype": "bfloat16", "workers": 2,
    "rounds": 2, "cold": False, "limit_bytes": None, "started": "2026-01-01T00:00:00+00:00",
    "versions": {"torch": "2.13"},
    "machine": {
        "cpu": "Some <CPU>", "cpus": 2, "memory_bytes": 8 << 30, "system": "Linux 6",
        "filesystem": "ext4", "python": "3.11", "commit": "abc",
    },
}  # fmt: skip


def line(label: str, total_s: float, **more: Any) -> dict[str, Any]:
    trace = [[total_s * i / 50, i * 4 * MIB, i * 3 * MIB, i * MIB] for i in range(51)]
    return {
        "kind": "load", "peer": label, "label": label, "delivers": "tensors", "ok": True,
        "reason": None, "values": "right", "import_s": 1.0, "load_s": total_s * 0.8,
        "first_use_s": total_s * 0.2, "total_s": total_s, "bytes_per_s": 1e9,
        "peak_rss_bytes": 200 * MIB, "peak_anonymous_bytes": 150 * MIB,
        "peak_file_bytes": 50 * MIB, "peak_cgroup_bytes": None, "other_cpus": 0.0,
        "stolen_cpus": 0.0, "trace": trace, **more,
    }  # fmt: skip


FAILED = {
    "kind": "load", "peer": "x", "label": "absent", "delivers": "?", "ok": False,
    "reason": "x is not installed",
}  # fmt: skip
UNFIT = {
    "kind": "load", "peer": "streamload_map", "label": "streamload map", "delivers": "module",
    "ok": False, "applies": False, "reason": "every tensor is cast, so none can be mapped",
}  # fmt: skip
LINES = [
    HEAD,
    *(line("floor: read + cast", s) for s in (0.3, 0.31)),
    *(line("streamload stream", s) for s in (0.4, 0.42)),
    *(line("a <loader> & more", s, values="wrong: wte.weight") for s in (1.0, 1.2)),
    FAILED,
    UNFIT,
]
EVIL = (
    "</title></td><script>document.title='EVIL'</script>"
    "<img src=x onerror=\"document.title='EVIL'\">"
    "<b title='\"><svg/onload=document.title='EVIL'>\u202e\x1b[31m\x00"
)


def hostile() -> list[dict[str, Any]]:
    """Every text of a measurement is markup."""
    machine = {**HEAD["machine"], "cpu": EVIL, "filesystem": EVIL, "commit": EVIL}
    head = {**HEAD, "path": EVIL, "dtype": EVIL, "machine": machine, "versions": {EVIL: EVIL}}
    loads = [line(EVIL, s, peer=EVIL, values=f"wrong: {EVIL}") for s in (0.4, 0.42)]
    failed = {**FAILED, "label": EVIL, "peer": EVIL, "reason": EVIL}
    return [head, line("floor: read + cast", 0.3), *loads, failed]


def many() -> list[dict[str, Any]]:
    """Thirty loaders that end at about the same memory, some with names of 200 letters."""
    names = [f"{'W' * 190 if i % 7 == 3 else 'loader'} number {i}" for i in range(27)]
    ours = [line(f"streamload {what}", 0.5 + len(what) / 9) for what in ("stream", "stored", "x")]
    failed = {**FAILED, "label": "M" * 200, "reason": "word " * 40 + "W" * 300}
    loads = [line(name, 0.2 + i**2 / 9, delivers="a module " * 5) for i, name in enumerate(names)]
    return [{**HEAD, "path": "folder-" * 30}, *ours, *loads, failed]


CASES = {
    "ordinary": LINES,
    "many": many(),
    "hostile": hostile(),
    "formulas": [HEAD, line("$\\frac{1}$ of $x_", 1.0), line("_hidden $", 2.0)],
    "one": [{**HEAD, "rounds": 1}, line("streamload stream", 0.003)],
    "no floor": [HEAD, line("transformers", 300.0, peak_rss_bytes=9000 * MIB)],
    "floor alone": [HEAD, line("floor: read", 1.0)],
    "some traces": [HEAD, line("a", 1.0, trace=[]), line("b", 2.0), line("streamload x", 3.0)],
    "nothing known": [
        {**HEAD, "dtype": None, "machine": {**HEAD["machine"], "memory_bytes": None}},
        line("a", 0.0, trace=[], import_s=None, bytes_per_s=None, peak_rss_bytes=None,
             peak_anonymous_bytes=None, peak_file_bytes=None, other_cpus=None, stolen_cpus=None),
    ],
    "all failed": [HEAD, FAILED, UNFIT],
}  # fmt: skip
