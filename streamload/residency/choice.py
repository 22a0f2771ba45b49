"""Which blocks of a mapped model stay in memory where not all of it fits. Pure.

A mapped model that does not fit costs one reading of the file per pass, since the kernel drops
pages in the order in which they come round again. Whole blocks that stay, and others that are read
ahead while the ones before them compute, cost only what does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from streamload.core.report import MemoryReport
from streamload.core.specs import Extent, numel
from streamload.core.wording import format_bytes, plural
from streamload.planning.records import MappedView, Plan, PlannedTensor

# One computes while the next is read.
RING_BUFFERS = 2
# What is left alone: activations, what libraries take when they are first used.
MARGIN_BYTES = 128 << 20
_PAGE = 4096
# Small holes between a block's tensors are cheaper read than jumped over.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a file that are read at once, whole pages, to ``position`` of a block's buffer."""

    file: str
    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class MappedBlock:
    """One block of a model, such as ``blocks.3``, whose weights are views of files.

    Attributes:
        path: of its module.
        tensors: those that are mapped and are nowhere else in the model.
        extents: the bytes that each of them is a view of.
    """

    path: str
    tensors: tuple[PlannedTensor, ...]
    extents: tuple[Extent, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What is read, in the order of the files; extents that nearly touch are read as one."""
        pages = sorted(
            (e.file, e.offset // _PAGE * _PAGE, -(-(e.offset + e.nbytes) // _PAGE) * _PAGE)
            for e in self.extents
        )
        merged: list[tuple[str, int, int]] = []
        for file, start, stop in pages:
            if merged and merged[-1][0] == file and start <= merged[-1][2] + _GAP_BYTES:
                merged[-1] = (file, merged[-1][1], max(merged[-1][2], stop))
            else:
                merged.append((file, start, stop))
        sizes = accumulate((stop - start for _, start, stop in merged), initial=0)
        return tuple(Run(*run, at) for run, at in zip(merged, sizes, strict=False))

    @cached_property
    def nbytes(self) -> int:
        """What it takes in memory, and what reading it brings."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def places(self) -> tuple[int, ...]:
        """Where each tensor begins in a buffer that the runs were read to."""
        return tuple(
            next(
                run.position + extent.offset - run.start
                for run in self.runs
                if run.file == extent.file and run.start <= extent.offset < run.stop
            )
            for extent in self.extents
        )

    @cached_property
    def widths(self) -> tuple[int, int]:
        """How wide its activations are between matrices: the narrowest and the widest."""
        shapes = [t.shape for t in self.tensors if len(t.shape) == 2] or [(1, 1)]
        return min(map(max, shapes)), max(map(max, shapes))


@dataclass(frozen=True)
class Residency:
    """What stays, and what is read for each pass.

    Attributes:
        blocks: all that are mapped.
        always_bytes: what must stay beside the blocks: mapped tensors outside of them, this
            process's own pages of files, and the margin.
        resident: how many of the first of ``order`` stay.
    """

    blocks: tuple[MappedBlock, ...]
    always_bytes: int
    resident: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Blocks in the order in which they are kept: those that stay are always spread evenly.

        Between two that stay there is then time to read one.
        """
        return tuple(_spread(len(self.blocks)))

    @property
    def ring_bytes(self) -> int:
        """The buffers through which the others pass."""
        return RING_BUFFERS * max((block.nbytes for block in self.blocks), default=0)

    @property
    def resident_bytes(self) -> int:
        return sum(self.blocks[at].nbytes for at in self.order[: self.resident])

    @property
    def streamed_bytes(self) -> int:
        """What one pass through the model reads."""
        return sum(self.blocks[at].nbytes for at in self.order[self.resident :])


def mapped_bytes(plan: Plan) -> int:
    """Bytes of the tensors that are views of files."""
    return sum(t.nbytes for t in plan.tensors if t.mapped is not None)


def choose_residents(
    plan: Plan, *, file_bytes: int, lookups: Collection[str] = ()
) -> Residency | None:
    """What stays of a mapped model; None if all of it fits, or if nothing can be done.

    Args:
        plan: with what there is of memory measured.
        file_bytes: pages of files that this process uses already (its libraries).
        lookups: tensors of which a pass reads a few rows only (embeddings).
    """
    memory, total = plan.memory, mapped_bytes(plan)
    room = memory.available_bytes - memory.needed_bytes - file_bytes - MARGIN_BYTES
    if not total or total <= room:
        return None
    blocks = tuple(_blocks(plan))
    inside = {t.name for block in blocks for t in block.tensors}
    rest = sum(
        t.nbytes
        for t in plan.tensors
        if t.mapped is not None and t.name not in inside and t.name not in lookups
    )
    found = Residency(blocks, rest + file_bytes + MARGIN_BYTES, 0)
    left = room - rest - found.ring_bytes
    if len(blocks) <= RING_BUFFERS or left < 0:
        return None
    count = 0
    for at in found.order:
        left -= blocks[at].nbytes
        if left < 0:
            break
        count += 1
    return replace(found, resident=count) if count < len(blocks) else None


def with_residency(memory: MemoryReport, residency: Residency) -> MemoryReport:
    """The report, which says what stays and what each pass costs."""
    return replace(
        memory,
        blocks=len(residency.blocks),
        resident_blocks=residency.resident,
        streamed_bytes=residency.streamed_bytes,
    )


def residency_notice(plan: Plan, residency: Residency) -> str:
    """What a user should know, in words."""
    memory = plan.memory
    return (
        f"larger than memory: {format_bytes(mapped_bytes(plan))} are mapped, "
        f"{format_bytes(memory.available_bytes)} are available ({memory.limit} limit); about "
        f"{residency.resident} of {plural(len(residency.blocks), 'block')} stay in memory, and "
        f"each token reads {format_bytes(residency.streamed_bytes)} of the others"
    )


def _blocks(plan: Plan) -> Iterator[MappedBlock]:
    """The blocks in the order of their numbers; a tensor that is also elsewhere is in none."""
    found: dict[str, list[PlannedTensor]] = {}
    numbers: dict[str, int] = {}
    for tensor in plan.tensors:
        if tensor.mapped is None or tensor.layer is None or not tensor.nbytes:
            continue
        paths = {_path(name, tensor.layer) for name in (tensor.name, *tensor.aliases)}
        path = paths.pop()
        if path and not paths:
            found.setdefault(path, []).append(tensor)
            numbers[path] = tensor.layer
    # Encoder and decoder each count from 0.
    order = sorted(found, key=lambda path: (path.rpartition(".")[0], numbers[path]))
    for path in order:
        extents = tuple(_extent(t, t.mapped, plan) for t in found[path] if t.mapped is not None)
        yield MappedBlock(path, tuple(found[path]), extents)


def _extent(tensor: PlannedTensor, view: MappedView, plan: Plan) -> Extent:
    """The bytes of the file that a mapped tensor is a view of."""
    whole = plan.stored[view.stored_name].extent
    assert whole is not None, "what is mapped lies in a file"
    size = tensor.nbytes // numel(tensor.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, view.strides, strict=True))
    return Extent(whole.file, whole.offset + view.offset * size, span * size)


def _path(name: str, layer: int) -> str:
    """``a.blocks.3`` of ``a.blocks.3.attn.weight``; empty if the number is not in the name."""
    parts = name.split(".")
    return ".".join(parts[: parts.index(str(layer)) + 1]) if str(layer) in parts[:-1] else ""


def _spread(count: int) -> Iterator[int]:
    """0 … count - 1 such that the first of them always lie about evenly (bits reversed)."""
    bits = max(count - 1, 1).bit_length()
    for number in range(1 << bits):
        at = int(f"{number:0{bits}b}"[::-1], 2)
        if at < count:
            yield at
