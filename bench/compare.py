"""All loaders on one checkpoint, in rounds, each measurement a process of its own."""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.checkpoints import results_dir
from bench.job import Job
from bench.machine import head_line
from streamload.measuring.peers import FilePeer, Peer
from streamload.measuring.rounds import in_turns, measure_load, prepare, set_cache


@dataclass(frozen=True)
class Comparison:
    """What is asked for.

    Attributes:
        path: folder or file to load.
        dtype: torch name to cast to; None keeps the stored one.
        rounds: how often each loader is measured.
        cold: drop the files from the page cache before each measurement.
        limit_bytes: memory of a control group made for each measurement.
    """

    path: str
    dtype: str | None
    workers: int
    rounds: int
    cold: bool = False
    limit_bytes: int | None = None
    timeout_s: float = 600

    def job(self, peer: Peer) -> Job:
        # .bin copies are the same for all that read them.
        own = "torch" if "torch" in peer.name or peer.name == "litgpt_lazy" else peer.name
        own_dir = os.path.join(results_dir(), "own-formats", _identity(self.path), own)
        return Job(self.path, self.dtype, self.workers, own_dir)


def _identity(path: str) -> str:
    """A folder's name for copies of this checkpoint: another one if its files were changed."""
    files = Job(path, None, 1).files
    facts = [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    name = os.path.basename(os.path.abspath(path))
    return f"{name}-{zlib.crc32(repr(facts).encode()):08x}"


def compare(
    asked: Comparison, peers: Iterable[Peer], *, tell: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Measure; yields the head line, then one line per measurement as it is taken."""
    peers = list(peers)
    yield head_line(
        "compare",
        asked.path,
        peers,
        dtype=asked.dtype,
        workers=asked.workers,
        rounds=asked.rounds,
        cold=asked.cold,
        limit_bytes=asked.limit_bytes,
    )
    ready: list[Peer] = []
    for peer in peers:
        reason = peer.available()
        if isinstance(peer, FilePeer) and peer.delivers.startswith("module"):
            # Its model has published names, and would be filled at random.
            reason = reason or asked.job(peer).foreign_names()
        if reason is None and peer.prepare is not None:
            tell(f"preparing: {peer.label}")
            reason = prepare(peer, asked.job(peer))
        if reason is None:
            ready.append(peer)
        else:
            yield _line(peer) | {"round": 0, "ok": False, "reason": reason}
    for number, peer in in_turns(ready, asked.rounds):
        tell(f"round {number} of {asked.rounds}: {peer.label}")
        job = asked.job(peer)
        cache = set_cache(_files(job), cold=asked.cold)
        dropped = asked.cold and cache["cache_problem"] is None
        yield {
            "round": number,
            **load_line(peer, job, limit_bytes=asked.limit_bytes, timeout_s=asked.timeout_s),
            "cache": "cold (fadvise)" if dropped else "warm",
            **cache,
        }


def load_line(peer: Peer, job: Job, **options: Any) -> dict[str, Any]:
    """One measurement of a load, with the options of ``measure_load``."""
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


def _files(job: Job) -> list[str]:
    """What the peer will read: its own files if it has any."""
    if os.path.isdir(job.own_dir):
        own = [os.path.join(job.own_dir, name) for name in sorted(os.listdir(job.own_dir))]
        if own:
            return own
    return job.files


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
