"""From the start of the process to the first token and to the last, each time a new process."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.job import Job
from bench.machine import head_line
from bench.report import tables
from streamload.measuring.peers import Peer
from streamload.measuring.rounds import set_cache, watch_tokens

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
    timeout_s: float = 1200,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Measure; yields the head line, then one line per process."""
    names = " and ".join(dtype or "stored" for dtype in dtypes)
    asked: dict[str, Any] = {"workers": workers, "rounds": rounds, "cold": cold, "tokens": count}
    yield head_line("generate", path, peers, dtype=names, **asked)
    ids = [token % vocabulary for token in PROMPT]
    for number in range(rounds):
        for dtype in dtypes:
            for peer in peers:
                tell(f"round {number + 1} of {rounds}: {peer.label}, {dtype or 'stored'}")
                job = Job(path, dtype, workers)
                yield {
                    "kind": "tokens",
                    "peer": peer.name,
                    "label": peer.label,
                    "dtype": dtype or "stored",
                    "round": number + 1,
                    **set_cache(job.files, cold=cold),
                    **_measure(peer, job, ids, count, timeout_s),
                }


def _measure(peer: Peer, job: Job, ids: list[int], count: int, timeout_s: float) -> dict[str, Any]:
    reason = job.reason_against(peer)
    if reason is not None:
        return {"ok": False, "reason": reason}
    watch = watch_tokens(peer, job, ids, count, timeout_s=timeout_s)
    came = [
        (at_s, event["token"])
        for at_s, event in zip(watch.times_s, watch.events, strict=True)
        if event["event"] == "token"
    ]
    if watch.failure is not None or len(came) < count:
        return {"ok": False, "reason": watch.failure or f"{len(came)} of {count} tokens"}
    figures = watch.figures()
    return {
        "ok": True,
        "reason": None,
        "tokens": [token for _, token in came],
        "first_token_s": came[0][0],
        "last_token_s": came[-1][0],
        **figures,
        # All of the process counts here, the libraries too.
        "peak_rss_bytes": figures["start_rss_bytes"] + figures["peak_rss_bytes"],
    }


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Setting and table: medians, with the smallest and the largest."""
    count = lines[0]["tokens"]
    columns = (
        "loader", "dtype", "first token s", "min-max", f"token {count} s", "min-max",
        "tokens/s after", "peak RSS MiB", "tokens as the first row",
    )  # fmt: skip
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines[1:]:
        groups.setdefault((line["dtype"], line["label"]), []).append(line)
    body, references = [], dict[str, list[int]]()
    for (dtype, label), measured in sorted(groups.items()):
        reference = references.setdefault(dtype, measured[0].get("tokens", []))
        body.append([label, dtype, *_cells(measured, reference)])
    return tables.document(lines, columns, body, range(2, 9))


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
