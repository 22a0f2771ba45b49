"""The counts behind the README's reliability table: ``python -m tests.reliability`` prints it.

Tests note what they did with ``record``; the command runs them and adds up what was noted, so
that every number in the table was done in that very run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from xml.etree import ElementTree

__all__ = ["main", "record"]

_VARIABLE = "STREAMLOAD_RELIABILITY_COUNTS"
# Row of the table → the tests whose passed cases count in it.
_CASES = {
    "damaged or odd safetensors headers and indexes": (
        "tests/sources/test_header.py",
        "tests/sources/test_index.py",
    ),
    "torch files: code, cuts, contradictions": (
        "tests/sources/torch/test_torch_faults.py",
        "tests/sources/torch/test_torch_zip.py",
    ),
    "raw GPT-NeoX folders": ("tests/sources/test_neox_raw.py", "tests/families/test_raw_neox.py"),
    "paths, file systems, hub caches": (
        "tests/sources/test_paths.py",
        "tests/sources/test_detect.py",
        "tests/sources/test_hub.py",
    ),
    "names, ties, shapes, state of the module": (
        "tests/loading/test_load_into.py",
        "tests/loading/test_state.py",
        "tests/planning",
    ),
    "casts and overflow": ("tests/engine/test_casts.py", "tests/faults/test_casts.py"),
    "faults midway": ("tests/faults/test_faults.py", "tests/faults/test_midway.py"),
    "writing: full disk, kill, leftovers": (
        "tests/saving/test_export.py",
        "tests/saving/test_atomic.py",
        "tests/saving/test_files.py",
        "tests/faults/test_killed.py",
        "tests/downloading/test_download.py",
        "tests/saving/test_cache.py",
        "tests/faults/test_disk.py",
    ),
    "memory limits": ("tests/system", "tests/faults/test_memory_limit.py"),
    "threads, forks, repetition": ("tests/faults/test_together.py",),
    "readers of mutated files": ("tests/fuzz",),
}


def record(what: str, count: int) -> None:
    """Note that ``count`` things of this kind were done, if the table is being made."""
    path = os.environ.get(_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps([what, count]) + "\n")


def _passed(paths: tuple[str, ...], folder: str) -> tuple[int, int, int]:
    """Run tests; (passed, failed, skipped)."""
    report = os.path.join(folder, "report.xml")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short"]
    result = subprocess.run(
        [*command, f"--junitxml={report}", *paths],
        env={**os.environ, _VARIABLE: os.path.join(folder, "counts")},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        print(result.stdout[-4000:], file=sys.stderr)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    found = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    failed = found["failures"] + found["errors"]
    return found["tests"] - failed - found["skipped"], failed, found["skipped"]


def main() -> int:
    """Print the table as Markdown; 1 if a test failed."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        print("python -m tests.reliability needs pytest: pip install -e '.[test]'", file=sys.stderr)
        return 1
    failures = 0
    print("| what was tried | done | failed | skipped here |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for row, paths in _CASES.items():
            passed, failed, skipped = _passed(paths, folder)
            failures += failed
            print(f"| cases: {row} | {passed} | {failed} | {skipped} |", flush=True)
        for what, count in _noted(os.path.join(folder, "counts")).items():
            print(f"| {what} | {count} | 0 | 0 |")
    return 1 if failures else 0


def _noted(path: str) -> Counter[str]:
    noted: Counter[str] = Counter()
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                what, count = json.loads(line)
                noted[what] += count
    return noted


if __name__ == "__main__":
    sys.exit(main())
