"""All loaders on one checkpoint, in rounds, each measurement a process of its own."""

import glob
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.checkpoints import results_dir
from bench.job import Job
from bench.machine import head_line
from streamload.measuring.peers import Peer
from streamload.measuring.rounds import in_turns, measure_load, prepare, set_cache


def job_for(peer: Peer, path: str, dtype: str | None, workers: int) -> Job:
    """The peer's job; its own files are in another folder if the checkpoint's were changed."""
    files = Job(path, None, 1).files
    facts = [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    identity = f"{os.path.basename(os.path.abspath(path))}-{zlib.crc32(repr(facts).encode()):08x}"
    # .bin copies are the same for all that read them.
    own = "torch" if "torch" in peer.name or peer.name == "litgpt_lazy" else peer.name
    own_dir = os.path.join(results_dir(), "own-formats", identity, own)
    return Job(path, dtype, workers, own_dir)


def compare(
    path: str,
    peers: Sequence[Peer],
    *,
    dtype: str | None,
    workers: int,
    rounds: int,
    cold: bool = False,
    limit_bytes: int | None = None,
    timeout_s: float = 600,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measure; yields the head line, then one line per measurement as it is taken.

    The files are dropped from the page cache before each if ``cold``. ``limit_bytes`` is the
    memory of a control group made for each.
    """
    asked: dict[str, Any] = {"dtype": dtype, "workers": workers, "rounds": rounds}
    yield head_line("compare", path, peers, **asked, cold=cold, limit_bytes=limit_bytes)
    ready: list[Peer] = []
    for peer in peers:
        job = job_for(peer, path, dtype, workers)
        reason = job.reason_against(peer)
        unfit = peer.unfit(job) if reason is None else None
        if reason is None and unfit is None and peer.prepare is not None:
            tell(f"preparing: {peer.label}")
            reason = prepare(peer, job)
        if reason is None and unfit is None:
            ready.append(peer)
        else:
            applies = unfit is None
            failed = {"round": 0, "ok": False, "reason": reason or unfit, "applies": applies}
            yield _line(peer) | failed
    for count, (number, peer) in enumerate(in_turns(ready, rounds), start=1):
        tell(f"{count} of {rounds * len(ready)}: {peer.label}, round {number}")
        job = job_for(peer, path, dtype, workers)
        own = glob.glob(os.path.join(glob.escape(job.own_dir), "*"))
        cache = set_cache(own or job.files, cold=cold)
        dropped = cold and cache["cache_problem"] is None
        yield {
            "round": number,
            **load_line(peer, job, limit_bytes=limit_bytes, timeout_s=timeout_s),
            "cache": "cold (fadvise)" if dropped else "warm",
            **cache,
        }


def load_line(peer: Peer, job: Job, **options: Any) -> dict[str, Any]:
    """One measurement of a load, with the options of ``measure_load``."""
    reason = job.reason_against(peer)
    figures: dict[str, Any] = {"ok": False, "reason": reason}
    if not reason:
        figures = measure_load(peer, job, **options)
    if not figures["ok"]:
        path = os.path.abspath(job.path)
        reason = figures["reason"].replace(path, os.path.basename(path))
        return _line(peer) | figures | {"reason": reason}
    file_bytes = sum(piece.nbytes for piece in job.pieces)
    sizes = {"file_bytes": file_bytes, "bytes_per_s": file_bytes / figures["total_s"]}
    return _line(peer) | figures | sizes


def _line(peer: Peer) -> dict[str, Any]:
    return {"kind": "load", "peer": peer.name, "label": peer.label, "delivers": peer.delivers}
