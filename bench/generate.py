"""From the start of the process to the first token and to the last, each time a new process."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.job import Job
from bench.machine import head_line
from bench.report import tables
from streamload.measuring.own_peers import FLOORS
from streamload.measuring.peers import Peer
from streamload.measuring.rounds import in_turns, measure_load, set_cache, watch_tokens

PROMPT = [15496, 11, 616, 1438, 318, 262, 1708, 290, 314, 1101, 257]
"""Eleven ids, as GPT-2's vocabulary has them; smaller ones for smaller vocabularies."""


def generate(
    path: str,
    dtypes: Sequence[str | None],
    peers: Sequence[Peer],
    *,
    count: int,
    rounds: int,
    workers: int,
    vocabulary: int,
    cold: bool = False,
    limit_bytes: int | None = None,
    timeout_s: float = 1200,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measure; yields the head line, then one line per process.

    With ``limit_bytes`` each process is in a control group of that size, the files are cold (pages
    that others have read would not count in it), and how fast the disk reads them is measured
    beside each.
    """
    names = " and ".join(dtype or "stored" for dtype in dtypes)
    cold = cold or limit_bytes is not None
    asked: dict[str, Any] = {"workers": workers, "rounds": rounds, "cold": cold, "tokens": count}
    yield head_line("generate", path, peers, dtype=names, limit_bytes=limit_bytes, **asked)
    ids = [token % vocabulary for token in PROMPT]
    for dtype in dtypes:
        # In another order every round, so that none always finds what the same one left.
        for turn, (number, peer) in enumerate(in_turns(peers, rounds), start=1):
            what = f"{dtype or 'stored'}: {peer.label}, round {number}"
            tell(f"{turn} of {rounds * len(peers)}: {what}")
            job = Job(path, dtype, workers)
            found = {
                "kind": "tokens",
                "peer": peer.name,
                "label": peer.label,
                "dtype": dtype or "stored",
                "round": number,
                **set_cache(job.files, cold=cold),
                **_measure(peer, job, ids, count, timeout_s, limit_bytes),
            }
            if limit_bytes is not None:
                found["disk_bytes_per_s"] = _disk_rate(job, timeout_s)
            yield found


def _disk_rate(job: Job, timeout_s: float) -> float | None:
    """Bytes a second that reading the files alone brings, from the disk."""
    set_cache(job.files, cold=True)
    read = measure_load(FLOORS["read"], job, timeout_s=timeout_s, grouped=False, first_use=False)
    return sum(piece.nbytes for piece in job.pieces) / read["load_s"] if read["ok"] else None


def _measure(
    peer: Peer, job: Job, ids: list[int], count: int, timeout_s: float, limit_bytes: int | None
) -> dict[str, Any]:
    reason = job.reason_against(peer)
    if reason is not None:
        return {"ok": False, "reason": reason}
    watch = watch_tokens(peer, job, ids, count, timeout_s=timeout_s, limit_bytes=limit_bytes)
    came = [
        (at_s, event["token"], fetched)
        for at_s, event, fetched in zip(
            watch.times_s, watch.events, watch.storage_bytes, strict=True
        )
        if event["event"] == "token"
    ]
    if watch.failure is not None or len(came) < count:
        return {"ok": False, "reason": watch.failure or f"{len(came)} of {count} tokens"}
    figures = watch.figures()
    (first_s, _, before), (last_s, _, after) = came[0], came[-1]
    per_token = None
    if before is not None and after is not None and count > 1:
        per_token = (after - before) / (count - 1)
    return {
        "ok": True,
        "reason": None,
        "tokens": [token for _, token, _ in came],
        "first_token_s": first_s,
        "last_token_s": last_s,
        "storage_bytes_per_token": per_token,
        **figures,
        # All of the process counts here, the libraries too.
        "peak_rss_bytes": figures["start_rss_bytes"] + figures["peak_rss_bytes"],
    }


def report(lines: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Setting and table: medians, with the smallest and the largest."""
    count = lines[0]["tokens"]
    columns: tuple[str, ...] = (
        "loader", "dtype", "first token s", "min-max", f"token {count} s", "min-max",
        "tokens/s after", "peak RSS MiB", _SAME,
    )  # fmt: skip
    limited = lines[0].get("limit_bytes") is not None
    columns += _LIMITED if limited else ()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines[1:]:
        groups.setdefault((line["dtype"], line["label"]), []).append(line)
    body, references = [], dict[str, list[int]]()
    for (dtype, label), measured in sorted(groups.items()):
        reference = references.setdefault(dtype, measured[0].get("tokens", []))
        body.append([label, dtype, *_cells(measured, reference)])
        if limited:
            body[-1] += _limited_cells(measured)
    numeric = set(range(2, len(columns))) - {columns.index(_SAME)}
    dropped = ("min-max", f"token {count} s", "tokens/s after")
    return tables.document(lines, columns, body, numeric, width=width, dropped=dropped)


_SAME = "tokens as the first row"
_LIMITED = ("s a token after", "read GB a token", "disk GB/s", "times what the disk needs")


def _limited_cells(measured: list[dict[str, Any]]) -> list[str]:
    """What a token costs after the first, against reading the same bytes and nothing else."""
    keys = ("storage_bytes_per_token", "disk_bytes_per_s")
    good = [line for line in measured if line["ok"] and all(line.get(key) for key in keys)]
    if len(good) < len(measured):
        return [""] * len(_LIMITED)
    seconds = [
        (line["last_token_s"] - line["first_token_s"]) / (len(line["tokens"]) - 1) for line in good
    ]
    read, rate = ([line[key] for line in good] for key in keys)
    times = [s * r / n for s, r, n in zip(seconds, rate, read, strict=True)]
    found = statistics.median(seconds), statistics.median(read) / 1e9, statistics.median(rate) / 1e9
    return [f"{value:.2f}" for value in (*found, statistics.median(times))]


def _cells(measured: list[dict[str, Any]], reference: list[int]) -> list[str]:
    bad = next((line for line in measured if not line["ok"]), None)
    if bad is not None:
        return [*[""] * 6, str(bad["reason"])]
    first, last = ([line[f"{which}_token_s"] for line in measured] for which in ("first", "last"))
    between = statistics.median(b - a for a, b in zip(first, last, strict=True))
    tokens = measured[0]["tokens"]
    same = sum(a == b for a, b in zip(tokens, reference, strict=False))
    peak_bytes = statistics.median(line["peak_rss_bytes"] for line in measured)
    return [
        f"{statistics.median(first):.2f}",
        f"{min(first):.2f}-{max(first):.2f}",
        f"{statistics.median(last):.2f}",
        f"{min(last):.2f}-{max(last):.2f}",
        f"{(len(tokens) - 1) / between:.1f}" if between > 0 else "",
        f"{peak_bytes / 2**20:.0f}",
        f"{same} of {len(tokens)}",
    ]
