"""The process that is measured: ``python -m streamload.measuring.child ORDER`` (JSON).

It does as little else as it can, in steps that the parent asks for. What it says: ``prepared``
or ``ready``, then ``token`` for each token, ``used``, and ``checked``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from streamload.measuring.machine import usage, usage_since
from streamload.measuring.peers import Job, Peer, read_job, read_peer
from streamload.measuring.watch import Channel


def main() -> None:
    """Do what the order says.

    The order has ``do`` (``prepare``, ``load`` or ``tokens``), ``peer``, ``job``, ``cgroup``
    (a control group's folder or None), for a load ``first_use``, for tokens ``ids`` and ``count``.
    """
    order = json.loads(sys.argv[1])
    if order["cgroup"]:
        with open(os.path.join(order["cgroup"], "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    channel = Channel()
    action = {"prepare": _prepare, "load": _load, "tokens": _tokens}[order["do"]]
    action(read_peer(order["peer"]), read_job(order["job"]), order, channel)


def _prepare(peer: Peer, job: Job, _order: dict[str, Any], channel: Channel) -> None:
    assert peer.prepare is not None
    peer.prepare(job)
    channel.say(event="prepared")


def _load(peer: Peer, job: Job, order: dict[str, Any], channel: Channel) -> None:
    start_s = time.perf_counter()
    peer.get_ready(job)
    import_s = time.perf_counter() - start_s
    from streamload.measuring.first_use import use_all

    usage()  # what it imports belongs before the load, too
    channel.say(event="ready", import_s=import_s)
    channel.wait()
    before, start_s = usage(), time.perf_counter()
    result = peer.load(job)
    loaded_s = time.perf_counter()
    touched_bytes = use_all(result, workers=job.workers) if order["first_use"] else 0
    used_s = time.perf_counter()
    report = getattr(result, "report", None)
    channel.say(
        event="used",
        load_s=loaded_s - start_s,
        first_use_s=used_s - loaded_s,
        touched_bytes=touched_bytes,
        copy_bytes_per_s=result if isinstance(result, float) else None,
        # Bytes that were streamed rather than mapped, where a report says so.
        written_bytes=None if report is None else int(report.bytes_written),
        **usage_since(before),
    )
    channel.wait()
    channel.say(event="checked", values=job.check(peer, result) if touched_bytes else "none kept")


def _tokens(peer: Peer, job: Job, order: dict[str, Any], channel: Channel) -> None:
    assert peer.tokens is not None
    channel.say(event="ready")
    channel.wait()
    for token in peer.tokens(job, order["ids"], order["count"]):
        channel.say(event="token", token=int(token))
    channel.say(event="used")
    channel.wait()


if __name__ == "__main__":
    main()
