"""The counts behind the README's reliability table: ``python -m tests.reliability`` prints it.

Tests note what they did with ``record``; the command runs them and adds up what was noted, so
that every number in the table was done in that very run.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter

__all__ = ["main", "record"]

_VARIABLE = "STREAMLOAD_RELIABILITY_COUNTS"
# Row of the table → the tests whose passed cases count in it.
_CASES = {
    "damaged or odd safetensors headers and indexes": (
        "tests/sources/test_header.py",
        "tests/sources/test_index.py",
    ),
    "torch files: code, cuts, contradictions": (
        "tests/sources/test_torch_faults.py",
        "tests/sources/test_torch_zip.py",
    ),
    "raw GPT-NeoX folders": ("tests/sources/test_neox_raw.py", "tests/families/test_raw_neox.py"),
    "paths, file systems, hub caches": (
        "tests/sources/test_paths.py",
        "tests/sources/test_detect.py",
        "tests/sources/test_hub.py",
    ),
    "names, ties, shapes, state of the module": (
        "tests/test_load_into.py",
        "tests/test_state.py",
        "tests/planning",
    ),
    "casts and overflow": ("tests/engine/test_casts.py", "tests/faults/test_casts.py"),
    "faults midway": ("tests/test_faults.py", "tests/faults/test_midway.py"),
    "writing: full disk, kill, leftovers": (
        "tests/test_export.py",
        "tests/writing",
        "tests/test_killed.py",
        "tests/faults/test_disk.py",
    ),
    "memory limits": ("tests/test_memory.py", "tests/faults/test_memory_limit.py"),
    "threads, forks, repetition": ("tests/faults/test_together.py",),
    "mutated files": ("tests/fuzz",),
}


def record(what: str, count: int) -> None:
    """Note that ``count`` things of this kind were done, if the table is being made."""
    path = os.environ.get(_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps([what, count]) + "\n")


def _passed(paths: tuple[str, ...], counts: str) -> tuple[int, int]:
    """Run tests; (passed, failed)."""
    there = [path for path in paths if os.path.exists(path)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *there],
        env={**os.environ, _VARIABLE: counts},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = result.stdout.strip().splitlines()[-1]
    found = {word: int(number) for number, word in _pairs(summary)}
    if found.get("failed") or found.get("error") or found.get("errors"):
        print(result.stdout[-4000:], file=sys.stderr)
    return found.get("passed", 0), found.get("failed", 0) + found.get("errors", 0)


def _pairs(summary: str) -> list[tuple[str, str]]:
    words = summary.replace(",", "").split()
    return [(one, two) for one, two in itertools.pairwise(words) if one.isdigit()]


def main() -> int:
    """Print the table as Markdown; 1 if a test failed."""
    failures = 0
    print("| what was tried | cases | failed |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        counts = os.path.join(folder, "counts")
        for row, paths in _CASES.items():
            passed, failed = _passed(paths, counts)
            failures += failed
            print(f"| {row} | {passed} | {failed} |", flush=True)
        noted: Counter[str] = Counter()
        if os.path.exists(counts):
            with open(counts) as file:
                for line in file:
                    what, count = json.loads(line)
                    noted[what] += count
    for what, count in noted.items():
        print(f"| {what} | {count} | 0 |")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
