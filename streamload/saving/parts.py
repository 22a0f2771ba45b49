"""A checkpoint written by several ranks, each from the parts that it holds, into the same files."""

from __future__ import annotations

import os
from collections import Counter as CountOf
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import PlanError, WriteError
from streamload.core.findings import Finding
from streamload.core.report import ExportReport
from streamload.core.specs import Shape, StridedCopy, contiguous_strides, numel
from streamload.engine.casts import can_overflow, count_overflows
from streamload.engine.execute import Execution
from streamload.mapping.layout import Axis, Layout, LayoutError, Piece, inverse
from streamload.module.sharded import held_part, is_dtensor, is_first_holder, local_of
from streamload.planning.records import Plan, PlannedTensor
from streamload.ranks.cards import digest, refuse_different
from streamload.ranks.shards import Shard, part_of
from streamload.ranks.together import Together
from streamload.saving.atomic import StagedFile, translated
from streamload.saving.checkpoint import write_checkpoint
from streamload.sources.blocks import bytes_of, torch_dtype
from streamload.sources.in_memory import MemorySource

# Elements that are cast at once.
_MOST = 4 << 20


class _File(Protocol):
    def write(self, data: memoryview, offset: int, /) -> None: ...


class _Move(NamedTuple):
    """Elements of a flat tensor of this rank that go into a published one."""

    planned: PlannedTensor
    values: Callable[[], torch.Tensor]
    copy: StridedCopy


class Parts:
    """What this rank writes of an export.

    Args:
        plan: as if every tensor were whole and contiguous; must hold.
        source: the tensors that are whole.
        tensors: the module's, by name; DTensors among them.
        group: all ranks, or None for one alone.

    Raises:
        PlanError: a part cannot be told, or is re-laid in a way that it cannot follow.
    """

    def __init__(
        self,
        plan: Plan,
        source: MemorySource,
        tensors: Mapping[str, torch.Tensor],
        group: Together | None,
    ) -> None:
        self._group = group
        self._ranks = () if group is None else group.ranks
        self._plan = plan
        self._is_first = group is None or group.rank == group.ranks[0]
        self._held: dict[str, tuple[Shard, torch.Tensor] | None] = {}
        self._moves: list[_Move] = []
        self._source, self._tensors = source, tensors
        for planned in plan.tensors:
            for copy in planned.copies:
                try:
                    self._moves += self._moves_of(planned, copy)
                except LayoutError as error:
                    raise PlanError(
                        f"{planned.name!r} cannot be written from the parts of "
                        f"{copy.stored_name!r}: {error}; gather it with full_tensor() first"
                    ) from error

    def fill(self, places: Mapping[str, tuple[StagedFile, int]]) -> Execution:
        """Write this rank's part, have the others write theirs, and wait for them."""
        files = list({id(file): file for file, _ in places.values()}.values())
        numbers = {id(file): at for at, file in enumerate(files)}
        if self._group is not None:
            shown = {name: [numbers[id(file)], at] for name, (file, at) in places.items()}
            paths = [os.path.realpath(file.temporary) for file in files]
            self._group.share("staged", {"files": paths, "places": shown})
        return self._finish(*self._write(places))

    def follow(self) -> Execution:
        """Write this rank's part into the files that the first rank has made."""
        assert self._group is not None, "one alone follows nobody"
        told = self._group.share("staged", {})[self._group.ranks[0]]
        files: list[_Elsewhere] = []
        try:
            for path in told["files"]:
                files.append(_Elsewhere(path))
            places = {name: (files[n], offset) for name, (n, offset) in told["places"].items()}
            found = self._write(places)
            for file in files:
                file.sync()
        except WriteError:
            self._group.raise_if_failed()  # then the first rank took the files away
            raise
        finally:
            for file in files:
                file.close()
        return self._finish(*found)

    def _finish(self, counts: Sequence[int], lost: Mapping[str, int]) -> Execution:
        """What all ranks wrote, once all have.

        Raises:
            PlanError: no rank holds some elements.
        """
        own: dict[str, Any] = {"counts": list(counts), "lost": dict(lost)}
        found = [own] if self._group is None else self._group.share("written", own).values()
        run = Execution()
        sums = [sum(column) for column in zip(*(one["counts"] for one in found), strict=True)]
        for planned, count in zip(self._plan.tensors, sums, strict=True):
            if count < numel(planned.shape):
                raise PlanError(
                    f"{planned.name!r}: ranks hold {count} of {numel(planned.shape)} elements"
                )
            run.bytes_written += count * BY_NAME[planned.dtype].itemsize
        overflows = CountOf[str]()
        for one in found:
            overflows.update(one["lost"])
        text = ": {count} finite values overflow by the cast"
        run.findings = [Finding(text, tensor=name, count=n) for name, n in overflows.items()]
        return run

    def _moves_of(self, planned: PlannedTensor, copy: StridedCopy) -> Iterator[_Move]:
        name = copy.stored_name
        if name not in self._held:
            self._held[name] = self._part(name)
        held = self._held[name]
        if not is_dtensor(self._tensors.get(name, torch.empty(0))):
            if self._is_first:
                yield _Move(planned, lambda: self._whole(name), copy)
        elif held is not None:
            shard, local = held
            for own in _narrowed(copy, tuple(self._tensors[name].shape), shard):
                yield _Move(planned, lambda: local.contiguous().view(-1), own)

    def _part(self, name: str) -> tuple[Shard, torch.Tensor] | None:
        """What this rank holds and is the one to write of a DTensor."""
        tensor = self._tensors.get(name)
        if tensor is None or not is_dtensor(tensor):
            return None
        shard, why = held_part(tensor)
        if shard is None:
            raise PlanError(f"{name!r} is distributed in a way that cannot be exported: {why}")
        return (shard, local_of(tensor)) if is_first_holder(tensor, self._ranks) else None

    def _whole(self, name: str) -> torch.Tensor:
        held = self._source.held(name)
        return self._source.tensor(name).reshape(-1) if held is None else held

    def _write(self, places: Mapping[str, tuple[_File, int]]) -> tuple[list[int], CountOf[str]]:
        """Write all moves; elements written of each tensor, and overflows by name."""
        numbers = {planned.name: at for at, planned in enumerate(self._plan.tensors)}
        counts = [0] * len(numbers)
        lost = CountOf[str]()
        for planned, values, copy in self._moves:
            file, offset = places[planned.name]
            dtype = torch_dtype(planned.dtype)
            for block, strides, at in _blocks(values(), copy):
                # On the host first, where a cast takes no memory of a device.
                stored = block.cpu()
                cast = stored.to(dtype).contiguous()
                if can_overflow(stored.dtype, dtype):
                    lost[planned.name] += count_overflows(stored, cast)
                _write_runs(file, offset, cast, strides, at)
                counts[numbers[planned.name]] += cast.numel()
                if self._group is not None:
                    self._group.sign()
        return counts, +lost


def write_parts(
    plan: Plan,
    source: MemorySource,
    path: str,
    own: Parts,
    group: Together | None,
    extras: Mapping[str, bytes],
    max_shard_bytes: int | None,
) -> ExportReport:
    """As ``write_checkpoint``, by all ranks; the first one makes the files and puts them in place.

    Raises:
        RankError, WriteError: on every rank; what was there before is whole.
    """
    if group is not None:
        shown = [(t.name, t.shape, t.dtype) for t in plan.tensors]
        text = repr((shown, os.path.basename(path), max_shard_bytes, sorted(extras)))
        refuse_different("exports", group.share("plan", {"what": digest([text])}))
    if group is not None and group.rank != group.ranks[0]:
        run = own.follow()
        files = group.share("committed", {})[group.ranks[0]]["files"]
        return ExportReport(
            path,
            tuple(files),
            plan.ledger,
            plan.dtype,
            notices=run.notices,
            bytes_written=run.bytes_written,
        )
    report = write_checkpoint(
        plan, source, path, extras=extras, max_shard_bytes=max_shard_bytes, filling=own.fill
    )
    if group is not None:
        group.share("committed", {"files": list(report.files)})
    return report


class _Elsewhere:
    """A file that another process has made."""

    def __init__(self, path: str) -> None:
        self._path = path
        with translated(path):
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  # closed by ``close``

    def write(self, data: memoryview, offset: int) -> None:
        with translated(self._path):
            self._file.seek(offset)
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])

    def sync(self) -> None:
        with translated(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _narrowed(copy: StridedCopy, shape: Shape, shard: Shard) -> Iterator[StridedCopy]:
    """The part of a move out of a whole, contiguous tensor that a rank's part of it makes."""
    if not shape:
        yield copy
        return
    # Seen from the tensor, which the boxes are of: where its elements go is where they come from.
    axes = zip(copy.shape, copy.target_strides, copy.source_strides, strict=True)
    piece = Piece(
        0, copy.target_offset, (copy.source_offset,), tuple(Axis(n, t, 0, s) for n, t, s in axes)
    )
    layout = Layout((numel(shape),), (piece,)).unflatten(0, shape)
    for own in part_of(layout, shard).copies((copy.stored_name,), contiguous_strides(shard.shape)):
        yield inverse(own, copy.stored_name)


def _blocks(
    values: torch.Tensor, copy: StridedCopy
) -> Iterator[tuple[torch.Tensor, Sequence[int], int]]:
    """Bounded blocks of a move in the order of its target: elements, target strides and place."""
    order = sorted(range(len(copy.shape)), key=lambda axis: -copy.target_strides[axis])
    shape, source, target = (
        [numbers[axis] for axis in order]
        for numbers in (copy.shape, copy.source_strides, copy.target_strides)
    )
    start = values.storage_offset() + copy.source_offset
    yield from _cut(torch.as_strided(values, shape, source, start), target, copy.target_offset)


def _cut(
    view: torch.Tensor, strides: Sequence[int], at: int
) -> Iterator[tuple[torch.Tensor, Sequence[int], int]]:
    if view.numel() <= _MOST or view.dim() == 0:
        yield view, strides, at
        return
    row = view.numel() // len(view)
    if row > _MOST:
        for number, part in enumerate(view):
            yield from _cut(part, strides[1:], at + number * strides[0])
        return
    step = _MOST // row
    for start in range(0, len(view), step):
        yield view[start : start + step], strides, at + start * strides[0]


def _write_runs(
    file: _File, offset: int, values: torch.Tensor, strides: Sequence[int], at: int
) -> None:
    """Write contiguous ``values`` to their places, which the strides tell, run by run."""
    shape, run, outer = tuple(values.shape), 1, values.dim()
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
        run *= shape[outer - 1]
        outer -= 1
    size = values.element_size()
    data = bytes_of(values.view(-1))
    for number, place in enumerate(product(*map(range, shape[:outer]))):
        where = at + sum(i * stride for i, stride in zip(place, strides, strict=False))
        file.write(data[number * run * size : (number + 1) * run * size], offset + where * size)
