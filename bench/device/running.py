"""All checks in order, each in a process of its own and within its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from bench.device import faults, rates, values
from bench.device.machine import Machine
from bench.device.rows import Check, Row, Rows, Sizes
from bench.report.tables import render

TOTAL_S = 600.0
_LEAST_S = 5.0


def environment(machine: Machine, sizes: Sizes) -> Rows:
    """What figures depend on."""
    from streamload.measuring.machine import describe

    for what, found in machine.facts().items():
        yield Row(what, found)
    about = describe(sizes.folder)
    for what in ("cpu", "cpus", "available_bytes", "system", "python", "filesystem"):
        yield Row(what, str(about[what]))


CHECKS = (
    Check("environment", 40, environment),
    Check("ceilings", 70, rates.ceilings),
    Check("fresh memory", 40, values.fresh_memory),
    Check("casts", 40, values.casts),
    Check("overflows", 60, values.overflows),
    Check("features", 60, values.features),
    Check("bandwidth", 100, rates.bandwidth),
    Check("many tensors", 60, rates.many),
    Check("leaks", 40, faults.leaks),
    Check("failures", 60, faults.failures),
    Check("two devices", 40, faults.two_devices),
    Check("peers", 80, rates.peers),
    Check("marked tests", 90, faults.marked_tests),
    Check("sanitizer", 120, faults.sanitizer),
)
Line = dict[str, Any]


def run_one(check: Check, machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """A check's rows as they come; what it raises is the last one."""
    try:
        yield from check.run(machine, sizes)
    except Exception as error:
        yield Row(check.name, f"{type(error).__name__}: {error}"[:300], "no error", False)


def run_all(
    sizes: Sizes, *, only: tuple[str, ...] = (), total_s: float = TOTAL_S,
    tell: Callable[[str], None] = lambda _: None, command: tuple[str, ...] = (),
) -> Iterator[Line]:  # fmt: skip
    """One line for each check: name, seconds, and its rows, as far as it came.

    Args:
        sizes: how much is done.
        only: names; all if there are none.
        total_s: after which no check is begun; each gets what is left at most.
        tell: is told what comes next.
        command: runs one check, given by name; that of this package if there is none.
    """
    start_s = time.perf_counter()
    for check in CHECKS:
        if only and check.name not in only:
            continue
        left_s = total_s - (time.perf_counter() - start_s)
        if left_s < _LEAST_S:
            row = Row(check.name, "no time was left", "run", False)
            yield {"name": check.name, "seconds": 0.0, "rows": [asdict(row)]}
            continue
        tell(f"{check.name} (at most {min(check.limit_s, left_s):.0f} s)")
        yield _in_process(check, sizes, min(check.limit_s, left_s), command)


def _in_process(check: Check, sizes: Sizes, limit_s: float, command: tuple[str, ...]) -> Line:
    begun_s = time.perf_counter()
    given = json.dumps(asdict(sizes))
    run = [*(command or (sys.executable, "-m", "bench.device")), check.name, given]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        done = subprocess.run(
            run, capture_output=True, text=True, timeout=limit_s, check=False, cwd=root
        )
        out, end = done.stdout, f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        is_whole = done.returncode == 0
    except subprocess.TimeoutExpired as error:
        held = error.stdout or b""
        out = held.decode() if isinstance(held, bytes) else held
        end, is_whole = f"stopped after {limit_s:.0f} s", False
    rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"what"')]
    if not is_whole:
        rows.append(asdict(Row(check.name, end, "an end", False)))
    return {"name": check.name, "seconds": time.perf_counter() - begun_s, "rows": rows}


def report(lines: list[Line]) -> str:
    """A table of all rows, and how many are not as they must be."""
    body = [
        (line["name"], row["what"], row["found"], row["must"], _word(row["ok"]))
        for line in lines
        for row in line["rows"]
    ]
    table = render(("check", "what", "found", "must", ""), body, ())
    bad = sum(row["ok"] is False for line in lines for row in line["rows"])
    spent_s = sum(line["seconds"] for line in lines)
    return f"{table}\n\n{bad} not as they must be; {spent_s:.0f} s."


def _word(ok: bool | None) -> str:
    return "" if ok is None else "ok" if ok else "NOT OK"
