"""From a job to new tensors, and from these to the module: the steps behind every load."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from streamload.core.display.bar import shown_progress
from streamload.core.report import LoadReport, MemorySample
from streamload.core.wording import format_bytes, plural
from streamload.engine.execute import Execution, execute
from streamload.engine.lanes.choice import lane_for
from streamload.loading.budget import check_memory, is_cache_in_the_way, measured
from streamload.loading.larger import Larger, larger_than_memory, measured_for, opened, told
from streamload.loading.ranked import agree_to_begin, agree_to_commit, replicas_told, telling
from streamload.loading.resolving import Job, hook_for, plan_load
from streamload.module.extra_state import OwnCode
from streamload.module.targets import existing_tensors
from streamload.planning.records import Plan
from streamload.ranks.together import Together
from streamload.saving.cache.through import look_up, store
from streamload.system.pages import made_ahead
from streamload.system.peaks import PeakSampler

# Of a load's memory over time, for its picture.
_SAMPLES = 256


@dataclass(frozen=True)
class Run:
    """A load whose bytes have all arrived; what is left is to commit them.

    Attributes:
        plan: as made from the checkpoint.
        loaded: the new tensors, and what was seen of the data.
        report: complete.
        own: what the module's own code adds.
        larger: what is to be attached to the model, if it does not fit.
    """

    plan: Plan
    loaded: Execution
    report: LoadReport
    own: OwnCode
    larger: Larger | None = None


def plan_only(job: Job, *, attaches: bool = False) -> Plan:
    """The plan of a load that is not carried out, with what memory there is now.

    ``attaches``: see ``run``.
    """
    plan = plan_load(job)
    plan = measured_for(plan, job.module) if attaches else measured(plan)
    if not job.source.is_remote:
        return plan
    nbytes, answers = job.source.received()
    received = f"{format_bytes(nbytes)} in {plural(answers, 'answer')}"
    return plan.noticed(f"only headers and small files were read: {received}")


def run(job: Job, ranks: Together | None = None, *, attaches: bool = False) -> Run:
    """Plan, check memory, and carry out; the module is not changed but where it holds data.

    Args:
        job: the load.
        ranks: all of them agree before the first byte, and have all bytes at the end.
        attaches: hooks may be put on the module, if it is mapped and does not fit.

    Raises:
        PlanError, MemoryBudgetError, RankError: nothing was touched.
        ReadError, CheckpointError: as the source or the data give cause.
    """
    start_s = time.perf_counter()
    anonymous_bytes, file_bytes = made_ahead()
    plan = plan_load(job)
    plan.raise_if_refused()
    existing = existing_tensors(job.module, plan) if job.module is not None else {}
    on_layer = hook_for(plan)
    lane = lane_for(
        (t.device for t in plan.tensors),
        job.settings,
        passing=on_layer is not None,
    )
    is_first = ranks is None or ranks.rank == ranks.ranks[0]
    with (
        PeakSampler(most=_SAMPLES) as sampler,
        shown_progress(job.settings.progress, plan.source, is_shown=is_first) as progress,
    ):
        followed, source, entry = look_up(plan, job.source, job.settings)
        with closing(entry):
            followed = measured(followed, already_bytes=anonymous_bytes)
            if ranks is not None:
                agree_to_begin(ranks, followed, source)
            if job.settings.check_memory:
                check_memory(followed, lane.room())
            residency = larger_than_memory(followed, job.module) if attaches else None
            larger = opened(residency, source)
            own = job.own.read(job.source)
            # Neither a caller's inference mode nor its default device may reach new tensors.
            with torch.inference_mode(mode=False), torch.device("cpu"):
                loaded = execute(
                    followed,
                    source,
                    lane,
                    existing=existing,
                    progress=telling(ranks, progress),
                    release=is_cache_in_the_way(followed),
                    on_layer=on_layer,
                )
            store(entry, loaded)
    followed = told(replace(followed, findings=()), None if larger is None else larger.residency)
    report = replace(
        plan.report,
        mode=followed.options.mode,
        layout="stored" if followed.options.stored_order else "contiguous",
        notices=(
            *plan.notices,
            *followed.notices,
            *loaded.notices,
            *replicas_told(ranks, followed),
        ),
        bytes_read=loaded.bytes_read,
        bytes_unwanted=loaded.bytes_unwanted,
        bytes_written=loaded.bytes_written,
        bytes_mapped=sum(t.nbytes for t in followed.tensors if t.mapped is not None),
        elapsed_s=time.perf_counter() - start_s,
        memory=replace(
            followed.memory,
            peak_rss_bytes=max(sampler.peaks.rss_bytes, 0) + anonymous_bytes + file_bytes,
            peak_anonymous_bytes=max(sampler.peaks.anonymous_bytes, 0) + anonymous_bytes,
            peak_file_bytes=max(sampler.peaks.file_bytes, 0) + file_bytes,
            peak_device_bytes=lane.peak_bytes(),
        ),
        trace=_trace(sampler),
    )
    if ranks is not None:
        report = agree_to_commit(ranks, report)
    return Run(plan, loaded, report, own, larger)


def _trace(sampler: PeakSampler) -> tuple[MemorySample, ...]:
    """What was sampled, over the first sample."""
    _, first = sampler.samples[0]
    return tuple(
        MemorySample(
            elapsed_s,
            held.rss - first.rss,
            held.anonymous - first.anonymous,
            held.file - first.file,
        )
        for elapsed_s, held in sampler.samples
    )
