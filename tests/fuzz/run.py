"""A run of mutated files of all kinds, in one process: ``python -m tests.fuzz.run SEED COUNT``.

Prints one JSON line: counts by kind and verdict, the failures, time and memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from safetensors.torch import save_file

from tests.fuzz import seeds
from tests.fuzz.files import (
    mutated_distcp,
    mutated_index,
    mutated_legacy,
    mutated_safetensors,
    mutated_zip,
)
from tests.fuzz.gguf_files import gguf_seeds, mutated_gguf
from tests.fuzz.judge import LIMIT_S, Verdict, judged

__all__ = ["KINDS", "main", "run"]

# Kind → (share, file name, reference).
KINDS = {
    "safetensors header": (0.28, "m.safetensors", "safetensors"),
    "index": (0.14, "m.safetensors.index.json", "index"),
    "torch zip": (0.168, "m.bin", "torch"),
    "torch legacy": (0.112, "m.pt", "torch"),
    "distributed metadata": (0.15, "run/.metadata", "distributed"),
    "gguf": (0.15, "m.gguf", "gguf"),
}


def makers(kind: str, folder: str) -> Callable[[Random], bytes]:
    """A function that makes one mutated file; what must lie beside it is written to ``folder``."""
    if kind == "index":
        return lambda rng: mutated_index(seeds.index_text(), rng)
    if kind == "gguf":
        return lambda rng: mutated_gguf(rng.choice(gguf_seeds()), rng)
    found, change = {
        "safetensors header": (seeds.safetensors_seeds, mutated_safetensors),
        "torch zip": (seeds.zip_seeds, mutated_zip),
        "torch legacy": (seeds.legacy_seeds, mutated_legacy),
        "distributed metadata": (partial(seeds.distcp_seeds, _below(folder)), mutated_distcp),
    }[kind]
    written = found()
    return lambda rng: change(rng.choice(written), rng)


def _below(folder: str) -> str:
    return os.path.join(folder, "run")


def run(seed: int, count: int, folder: str, *, keep: str | None = None) -> dict[str, object]:
    """Judge ``count`` mutated files; a failing one is kept in the folder ``keep``."""
    for name, tensors in seeds.SHARDS.items():
        save_file(tensors, os.path.join(folder, name))
    verdicts: dict[str, Counter[str]] = {}
    failures: list[str] = []
    stricter: Counter[str] = Counter()
    start_s, slowest_s = time.perf_counter(), 0.0
    for kind, (share, name, reference) in KINDS.items():
        rng, make = Random(f"{seed} {kind}"), makers(kind, folder)
        counts = verdicts.setdefault(kind, Counter())
        for number in range(round(count * share)):
            data = make(rng)
            verdict = _judge(os.path.join(folder, name), data, reference, number)
            counts[verdict.kind] += 1
            slowest_s = max(slowest_s, verdict.elapsed_s)
            if verdict.kind == "stricter":
                stricter[f"{kind}: {_bare(verdict.text)}"] += 1
            if verdict.is_failure and len(failures) < 50:
                failures.append(f"{kind} {seed}/{number}: {verdict.kind}: {verdict.text}")
                if keep is not None:
                    with open(
                        os.path.join(keep, f"{seed}-{number}-{os.path.basename(name)}"), "wb"
                    ) as file:
                        file.write(data)
    return {
        "verdicts": verdicts,
        "failures": failures,
        "stricter": stricter.most_common(),
        "slowest_s": slowest_s,
        "elapsed_s": time.perf_counter() - start_s,
    }


def _judge(path: str, data: bytes, reference: str, number: int) -> Verdict:
    for _ in range(3):  # a busy machine is not our slowness: the best of three counts
        if os.path.lexists(path):
            os.unlink(path)
        with open(path, "wb") as file:
            file.write(data)
        verdict = judged(path, reference, mode="map" if number % 4 == 3 else "stream")
        if verdict.kind != "slow":
            break
    return verdict


def _bare(text: str) -> str:
    """A message without what differs from file to file."""
    import re

    text = text.partition(": ")[2]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d+", "_", text)[:90]


def main(arguments: list[str]) -> int:
    seed, count = map(int, arguments[:2])
    keep = arguments[2] if len(arguments) > 2 else None
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        run(-1, 40, folder)  # imports, thread stacks
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = run(seed, count, folder, keep=keep)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(found | {"grown_bytes": (after - before) << 10, "limit_s": LIMIT_S}))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
