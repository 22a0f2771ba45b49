"""Files of figures: JSON lines, the first of which says what was measured, where and how."""

import collections
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_SAME = ("command", "path", "dtype", "workers", "cold", "limit_bytes", "tokens")
_SAME_MACHINE = ("cpu", "cpus", "memory_bytes")


def write_lines(lines: Iterable[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Append each line to ``path`` as it comes, and keep it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    kept = []
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()
            kept.append(line)
    return kept


def read_lines(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of one run, or of several of the same thing on the same machine, together.

    Raises:
        ValueError: a file holds something else, or the runs are not of the same thing.
        OSError: a file cannot be read.
    """
    runs = [list(_read(path)) for path in paths]
    head = dict(runs[0][0])
    for path, (other, *_) in zip(paths, runs, strict=True):
        for key, ours, theirs in (
            *((key, head.get(key), other.get(key)) for key in _SAME),
            *((key, head["machine"][key], other["machine"][key]) for key in _SAME_MACHINE),
        ):
            if ours != theirs:
                raise ValueError(f"{paths[0]} has {key} {ours}, {path} has {theirs}")
        head["versions"] = {**other["versions"], **head["versions"]}
    lines = [line for run in runs for line in run[1:]]
    taken = collections.Counter(line.get("peer") for line in lines)
    if len(runs) > 1:
        head["rounds"] = max(taken.values(), default=0)
    return [head, *lines]


def _read(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            kind = line.get("kind") if isinstance(line, dict) else None
            if kind is None or (number == 1) != (kind == "run"):
                raise ValueError(f"{path}, line {number}: these are not figures of this program")
            yield line
    if os.path.getsize(path) == 0:
        raise ValueError(f"{path} is empty")
