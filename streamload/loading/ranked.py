"""A load by several ranks: what they compare before the first byte and agree on after the last."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace

from streamload.core.options import Progress, Settings
from streamload.core.report import LoadReport, RankReport
from streamload.core.specs import Extent, TensorSpec
from streamload.core.wording import format_bytes, plural
from streamload.planning.records import Plan
from streamload.ranks.cards import Card, digest, refuse_differences, refuse_lack_of_memory
from streamload.ranks.together import Together
from streamload.sources.base import Source

# Headers of two steps of one training run are equal; a few bytes of some tensors are not.
_SAMPLES, _SAMPLE_BYTES = 16, 512


def agree_to_begin(group: Together, plan: Plan, source: Source) -> None:
    """Return once every rank is about to load the same, and all of it fits into memory.

    Raises:
        RankError, MemoryBudgetError: on every rank.
    """
    own = Card(
        plan.source,
        digest(_stored(plan, source)),
        digest(map(repr, _module(plan))),
        digest([repr(_options(plan.options))]),
        _host(plan.memory.limit),
        plan.memory.needed_bytes,
        plan.memory.available_bytes,
        plan.memory.limit,
    )
    cards = {rank: Card(**found) for rank, found in group.share("plan", asdict(own)).items()}
    refuse_differences(cards)
    if plan.options.check_memory:
        refuse_lack_of_memory(cards)


def agree_to_commit(group: Together, report: LoadReport) -> LoadReport:
    """The report with every rank's share, once all bytes of all of them have arrived.

    Raises:
        RankError: a rank failed or is gone.
    """
    memory = report.memory
    own = RankReport(
        group.rank,
        _host(memory.limit),
        report.bytes_read,
        report.bytes_unwanted,
        report.bytes_written + report.bytes_mapped,
        memory.peak_rss_bytes,
        memory.peak_anonymous_bytes,
        report.elapsed_s,
    )
    found = group.share("arrived", asdict(own))
    return replace(report, ranks=tuple(RankReport(**found[rank]) for rank in group.ranks))


def replicas_told(group: Together | None, plan: Plan) -> tuple[str, ...]:
    """What this rank holds whole, and that every rank that does has read it."""
    if group is None:
        return ()
    whole = [t for t in plan.tensors if not t.whole_shape or t.whole_shape == t.shape]
    size = format_bytes(sum(t.nbytes for t in whole))
    text = f"held whole, read by each rank that holds it: {plural(len(whole), 'tensor')} ({size})"
    return (text,) if whole else ()


def telling(group: Together | None, progress: Progress | None) -> Progress | None:
    """``progress``, which also tells the other ranks that this one is at work."""
    if group is None:
        return progress

    def told(done: int, total: int, name: str) -> None:
        group.sign()
        if progress is not None:
            progress(done, total, name)

    return told


def _host(limit: str) -> str:
    """Of what memory this is: the machine's, or a control group's on it."""
    name = socket.gethostname()
    if limit != "cgroup":
        return name
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return f"{name} {file.read().split()[-1]}"
    except (OSError, IndexError):
        return name


def _module(plan: Plan) -> Iterator[tuple[object, ...]]:
    """What goes where, whichever part of it a rank takes."""
    for t in plan.tensors:
        yield t.name, t.aliases, t.whole_shape or t.shape, t.dtype, t.sources, t.transform, t.is_new


def _options(settings: Settings) -> tuple[object, ...]:
    """The options that decide values, or whether there is a load at all."""
    layers = None if settings.layers is None else sorted(settings.layers)
    choices = (settings.ties, settings.overflow, settings.replicas)
    return settings.dtype, layers, settings.prefix, settings.check_memory, *choices


def _stored(plan: Plan, source: Source) -> Iterator[str]:
    """What is stored, and a few bytes of it."""
    specs = list(plan.stored.values())
    for spec in specs:
        yield from _described(spec)
    plain = [spec for spec in specs if spec.extent is not None and spec.nbytes]
    for spec in plain[:: max(len(plain) // _SAMPLES, 1)]:
        assert spec.extent is not None, "just chosen so"
        buffer = bytearray(min(_SAMPLE_BYTES, spec.extent.nbytes))
        part = Extent(spec.extent.file, spec.extent.offset, len(buffer))
        source.read_into(part, memoryview(buffer), tensor=spec.name)
        yield buffer.hex()


def _described(spec: TensorSpec) -> Iterator[str]:
    # Ranks may have the same files in other folders.
    at = None if spec.extent is None else (spec.extent.offset, spec.extent.nbytes)
    file = os.path.basename(spec.file)
    yield repr((spec.name, spec.dtype, spec.shape, file, at, spec.strides))
    if spec.encoding is not None:
        yield spec.encoding.words
        for part in spec.encoding.parts:
            yield from _described(part)
