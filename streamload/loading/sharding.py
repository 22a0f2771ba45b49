"""``--shard``: a model laid out over the ranks that torchrun started, or over ranks described."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from streamload.adapters.opening import open_values
from streamload.core.options import settings_from
from streamload.engine.jobs import jobs_of
from streamload.loading.budget import measured
from streamload.loading.building import build
from streamload.loading.calls import Loaded, load_prepared
from streamload.loading.resolving import Job, plan_load
from streamload.loading.transformers_load import build_theirs, load_theirs_prepared
from streamload.models.neox_model import NeoX
from streamload.module.sharded import distribute
from streamload.planning.records import Plan, Targets, TargetSpec
from streamload.ranks.layouts import cut_of, part_for


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one of several ranks would read, hold and need, in bytes."""

    rank: int
    bytes_read: int
    bytes_unwanted: int
    bytes_held: int
    needed_bytes: int


def load_sharded(
    path: str, how: str, *, by_transformers: bool = False, **options: Any
) -> tuple[Loaded, int]:
    """Load a checkpoint into a model that is sharded over all ranks that torchrun started.

    Args:
        path: see ``load``.
        how: ``"fsdp"`` or ``"tp"``.
        by_transformers: into transformers' class.
        **options: see LoadOptions.

    Returns:
        What was loaded, and this rank's number.
    """
    settings = settings_from(options)
    device = settings.device if isinstance(settings.device, str) else "cpu"
    with _process_group(device.partition(":")[0]) as rank:
        if device == "cuda":
            settings = replace(settings, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        prepare = partial(shard, how=how, device=device.partition(":")[0])
        if by_transformers:
            return load_theirs_prepared(path, settings, prepare=prepare), rank
        return load_prepared(path, settings, prepare), rank


def shard(model: nn.Module, how: str, device: str = "cpu") -> None:
    """Make an empty model's parameters DTensors over all ranks there are."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if how == "tp":
        distribute(model, mesh, partial(cut_of, how, by_head=isinstance(model, NeoX)))
        return
    from torch.distributed.fsdp import fully_shard

    for module in list(model.modules()):
        for block in module if isinstance(module, nn.ModuleList) else ():
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def plan_sharded(
    path: str, how: str, ranks: int, *, by_transformers: bool = False, **options: Any
) -> tuple[Plan, tuple[RankPlan, ...]]:
    """What ``load_sharded`` would do on so many ranks; no process but this one is needed.

    Returns:
        The plan of rank 0, and what each rank would read and need.
    """
    settings = settings_from(options)
    with open_values(path, settings) as source:
        job = build_theirs(source, settings) if by_transformers else build(source, settings)[2]
        plans = [plan_load(_on_rank(job, how, rank, ranks)) for rank in range(ranks)]
    return measured(plans[0]), tuple(_rank_plan(rank, plan) for rank, plan in enumerate(plans))


def _on_rank(job: Job, how: str, rank: int, ranks: int) -> Job:
    assert job.targets is not None, "a model was built"
    by_head = isinstance(job.module, NeoX)

    def part(spec: TargetSpec) -> TargetSpec:
        if spec.kind != "parameter" or not spec.is_meta:
            return spec
        held = part_for(how, spec.names[0], spec.shape, rank, ranks, by_head=by_head)
        return replace(spec, shard=held)

    return replace(job, targets=Targets(tuple(map(part, job.targets.specs))))


def _rank_plan(rank: int, plan: Plan) -> RankPlan:
    streamed = [t for t in plan.tensors if t.is_moved]
    order = {name: at for at, name in enumerate(plan.stored)}
    numbers: Mapping[str, int] = {t.name: at for at, t in enumerate(streamed)}
    jobs = list(jobs_of(streamed, plan.stored, order, numbers, plan.options))
    return RankPlan(
        rank,
        sum(job.nbytes for job in jobs),
        sum(job.unwanted_bytes for job in jobs),
        sum(t.nbytes for t in plan.tensors if t.is_new),
        plan.memory.needed_bytes,
    )


@contextmanager
def _process_group(device: str) -> Iterator[int]:
    """This rank's number, in a process group over all ranks that torchrun started.

    Raises:
        ValueError: torchrun did not start this process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.get_rank()
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--shard takes several ranks: start it as python -m torch.distributed.run "
            "--nproc-per-node N -m streamload load ..."
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
