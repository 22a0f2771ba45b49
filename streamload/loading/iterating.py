"""``iter_tensors``: one stored tensor after the other, without a plan or a module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from typing_extensions import Unpack

from streamload.adapters.opening import open_values
from streamload.core.dtypes import BY_NAME, DType
from streamload.core.errors import CheckpointError, PlanError, refuse
from streamload.core.options import DEFAULTS, LoadOptions, Settings, settings_from
from streamload.core.signatures import shows_options
from streamload.core.specs import Catalog
from streamload.core.wording import printable, suggestion
from streamload.engine.jobs import Job, JobQueue, jobs_of
from streamload.engine.lanes.base import NO_MEMORY, Destination
from streamload.engine.lanes.choice import lane_for, settled, unusable
from streamload.engine.lanes.cpu import refuse_odd_bools
from streamload.engine.workers import send
from streamload.planning.build import build_plan
from streamload.planning.dtype_rules import DtypeError, target_dtype
from streamload.planning.explaining import scale_notices
from streamload.planning.needed_memory import on_host
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype

_OPTIONS = "dtype device workers chunk_bytes ring_bytes prefix timeout_s download"
_STREAMS = ("mode", "stream")
# Names that one which is not there is compared with.
_COMPARED = 5000


@shows_options(only=_OPTIONS)
def iter_tensors(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    **options: Unpack[LoadOptions],
) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after the other in the file's order, under stored names.

    Only the tensor at hand is in memory; each is the caller's own. Opened through
    ``safetensors.safe_open`` where the file is of that kind. With a ``dtype`` quantised tensors
    are decoded; without, they are given out as they are stored. ``device`` is one for all.

    Args:
        path: see ``load``.
        names: only these; each must be there.
        **options: see LoadOptions.

    Raises:
        PlanError: a name is not in the checkpoint, a dtype has no counterpart in torch, or the
            device is not there.
        CheckpointError, ReadError: as ``load``; the tensors given out before are whole.

    Warns:
        UserWarning: a weight is FP8 (or narrower) and has a scale, which is not applied.
    """
    settings = settings_from(options)
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, like [{names!r}]")
    _refuse_unused(options)
    if not isinstance(settings.device, str):
        raise TypeError("iter_tensors takes one device, not a dict")
    settings = settled(settings)
    opened = ExitStack()
    try:
        everything = replace(settings, layers=None)
        source = opened.enter_context(open_values(path, everything, keeps_encoded=True))
        if settings.dtype is not None:
            refuse(source.catalog.problems, path=source.path)
        seen = _chosen(source, settings, names)
        dtypes = _dtypes(source, settings, seen)
        chosen = {stored: source.catalog[stored] for stored in seen.values()}
        for text in scale_notices(source.catalog, chosen):
            warnings.warn(f"{printable(source.path)}: {text}", stacklevel=2)
    except BaseException:
        opened.close()
        raise
    if on_host(str(settings.device)):
        return _iterate(opened, source, seen, dtypes)
    return _iterate_on_device(opened, source, seen, settings)


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """What would be given out otherwise than it was asked for."""
    unused = options.keys() - _OPTIONS.split()
    for name in sorted(unused):
        # Either of what everybody has by default is what is done.
        if options[name] not in (None, DEFAULTS[name]) and (name, options[name]) != _STREAMS:
            raise TypeError(f"iter_tensors takes no {name}: load_state_dict does")


def _chosen(source: Source, settings: Settings, names: Sequence[str] | None) -> dict[str, str]:
    """Seen name (prefix taken off) → stored name."""
    start = settings.prefix or ""
    start += "." if start and not start.endswith(".") else ""
    seen = {n[len(start) :]: n for n in source.catalog if n.startswith(start)}
    lost = [] if names is None else [name for name in names if name not in seen]
    why = unusable(str(settings.device))
    if lost or why:
        near = suggestion(lost[0], islice(seen, _COMPARED)) if len(lost) == 1 else ""
        text = why or f"not in the checkpoint: {', '.join(map(repr, lost))}{near}"
        raise PlanError(f"{printable(source.path)}: {text}")
    wanted = seen.keys() if names is None else set(names)
    return {name: stored for name, stored in seen.items() if name in wanted}


def _dtypes(source: Source, settings: Settings, seen: Mapping[str, str]) -> dict[str, DType]:
    """The dtype that each tensor is given out as, by the rule that holds for loads too."""
    made: dict[str, DType] = {}
    faults: list[str] = []
    for name, stored in seen.items():
        try:
            made[name] = target_dtype(
                name, (BY_NAME[source.catalog[stored].dtype],), None, settings.dtype
            )
        except DtypeError as error:
            faults.append(f"{stored!r}: {error}")
    if faults:
        raise PlanError(f"{printable(source.path)}: {'; '.join(faults)}")
    return made


def _iterate(
    opened: ExitStack, source: Source, seen: Mapping[str, str], dtypes: Mapping[str, DType]
) -> Iterator[tuple[str, torch.Tensor]]:
    with opened:
        for name, stored in seen.items():
            yield name, _tensor(source, stored, dtypes[name])


def _iterate_on_device(
    opened: ExitStack, source: Source, seen: Mapping[str, str], settings: Settings
) -> Iterator[tuple[str, torch.Tensor]]:
    """Through one ring for all: the caller's stream waits for each tensor, the host does not."""
    device = str(settings.device)
    names = {stored: name for name, stored in seen.items()}
    options = replace(settings, mode="stream", layers=None, prefix=None)
    chosen = Catalog({stored: source.catalog[stored] for stored in names})
    plan = build_plan(chosen, None, None, options, source=source.path)
    with opened:
        plan.raise_if_refused()
        numbers = {t.name: number for number, t in enumerate(plan.tensors)}
        order = {name: at for at, name in enumerate(plan.stored)}
        queue = JobQueue(jobs_of(plan.tensors, plan.stored, order, numbers, options))
        destinations = [Destination(device=device, is_fresh=True) for _ in numbers]
        lane = lane_for([device], options)
        job: Job | None = None
        try:
            for planned, destination in zip(plan.tensors, destinations, strict=True):
                with _making(device):
                    with lane.opening([planned]):
                        destination.tensor = lane.allocate(planned)
                    worker = lane.worker()
                    job = job or _next(queue, source)
                    while job is not None and job.target == numbers[planned.name]:
                        send(job, source, worker, destinations)
                        job = _next(queue, source)
                    lane.finish()
                tensor, destination.tensor = destination.tensor, NO_MEMORY
                yield names[planned.name], tensor
                del tensor
        finally:
            lane.settle()


def _next(queue: JobQueue, source: Source) -> Job | None:
    job, due = queue.take()
    for extent in due:
        source.prefetch(extent)
    return job


@contextmanager
def _making(device: str) -> Iterator[None]:
    """Only while a tensor is made: a generator must not leave modes on between two steps."""
    is_cuda = torch.device(device).type == "cuda"
    here = torch.cuda.device(device) if is_cuda else nullcontext()
    with here, torch.inference_mode(mode=False), torch.no_grad(), torch.device("cpu"):
        yield


def _tensor(source: Source, stored: str, dtype: DType) -> torch.Tensor:
    with _making("cpu"):
        tensor = source.tensor(stored)
        if tensor.dtype == torch.bool:
            try:
                refuse_odd_bools(tensor)
            except CheckpointError as error:
                raise CheckpointError(
                    str(error), path=source.catalog[stored].file, tensor=stored
                ) from error
        return tensor.to(dtype=torch_dtype(dtype.name))
