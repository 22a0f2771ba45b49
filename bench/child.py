"""The process that is measured: imports, waits for the word, loads, touches, waits, checks.

It speaks with its parent in JSON lines on what was its standard output, and does as little else
as it can. ``python -m bench.child ORDER`` where ORDER is JSON, see ``main``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from streamload.measuring.watch import Channel


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["cgroup"]:
        with open(os.path.join(order["cgroup"], "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    say = Channel().say

    {"prepare": _prepare, "load": _load, "tokens": _tokens, "scale": _scale}[order["do"]](
        order, say
    )


def _prepare(order: dict[str, Any], say: Callable[..., None]) -> None:
    from bench.job import Job, read_peer

    read_peer(order["peer"]).prepare(Job(**order["job"]))
    say(event="prepared")


def _load(order: dict[str, Any], say: Callable[..., None]) -> None:
    from bench.job import Job, read_peer

    job, peer = Job(**order["job"]), read_peer(order["peer"])
    start = time.perf_counter()
    peer.imports()
    import_s = time.perf_counter() - start
    from bench.values import check
    from streamload.measuring.touch import tensors_of, touch

    say(event="ready", import_s=import_s)
    Channel.wait()
    start = time.perf_counter()
    result = peer.load(job)
    loaded = time.perf_counter()
    touched_bytes = touch(tensors_of(result), workers=job.workers)
    used = time.perf_counter()
    say(
        event="used",
        load_s=loaded - start,
        first_use_s=used - loaded,
        touched_bytes=touched_bytes,
    )
    Channel.wait()
    if touched_bytes:
        say(event="checked", values=check(peer.stored(result, job), job))
    else:
        say(event="checked", values="none kept")


def _tokens(order: dict[str, Any], say: Callable[..., None]) -> None:
    from bench.job import Job, read_peer

    peer = read_peer(order["peer"])
    say(event="ready")
    Channel.wait()
    for token in peer.module.tokens(Job(**order["job"]), order["ids"], order["count"]):
        say(event="token", token=int(token))
    say(event="used")
    Channel.wait()


def _scale(order: dict[str, Any], say: Callable[..., None]) -> None:
    import torch  # noqa: F401

    from bench.scale import TASKS

    task = TASKS[order["task"]](order["path"])
    say(event="ready", import_s=0.0)
    Channel.wait()
    start = time.perf_counter()
    kept = task()
    say(event="used", load_s=time.perf_counter() - start, first_use_s=0.0, kept=len(kept))
    Channel.wait()


if __name__ == "__main__":
    main()
