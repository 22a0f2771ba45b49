"""Hooks on a model's blocks: each computes with weights in memory, and lies in its file otherwise.

Outside of its own forward a streamed block's weights are the mapped views that the load made, so
that whatever reads them (a state dict, an export) finds them; during its forward they are views of
a buffer. Where that cannot be, the mapped views stay, which are as right and only slower.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from streamload.residency.choice import MARGIN_BYTES, MappedBlock, Residency
from streamload.residency.direct import AgainFile
from streamload.residency.reader import BlockReader, Fill
from streamload.system.pages import are_resident, was_written

# Rows of activations that live at once in a block, as wide as its widest, in float32.
_ROWS = 8
_WIDEST_ITEM = 4
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass
class _Weight:
    """A parameter or buffer of a block.

    Attributes:
        tensor: the module's own object.
        mapped: the view of the file.
        version: of ``tensor`` when it was loaded.
        place: where its bytes begin in a buffer.
    """

    tensor: torch.Tensor
    mapped: torch.Tensor
    version: int
    place: int

    @property
    def nbytes(self) -> int:
        """From its first byte to its last."""
        return self._count * self.mapped.element_size()

    @property
    def _count(self) -> int:
        pairs = zip(self.mapped.shape, self.mapped.stride(), strict=True)
        return 1 + sum((n - 1) * step for n, step in pairs)

    def is_as_loaded(self) -> bool:
        """False if somebody wrote to it or gave it other memory: then it is left alone."""
        is_same = self.tensor.data_ptr() == self.mapped.data_ptr()
        return is_same and self.tensor._version == self.version

    def move_to(self, memory: mmap.mmap) -> bool:
        if not self.is_as_loaded():
            return False
        # A storage of its own range, as the mapped tensor has.
        dtype, count = self.mapped.dtype, self._count
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=self.place)
        self.tensor.data = flat.as_strided(self.mapped.shape, self.mapped.stride())
        return True

    def has_its_values(self) -> bool:
        """True if what it holds is what the file holds, bit by bit."""
        bits = _WHOLE[self.mapped.element_size()]
        return torch.equal(self.tensor.data.view(bits), self.mapped.view(bits))

    def move_back(self, address: int) -> None:
        """To the file, if it lies where ``move_to`` put it, and nobody wrote to it there."""
        is_same = self.tensor.data_ptr() == address + self.place
        if is_same and self.tensor._version == self.version:
            self.tensor.data = self.mapped


@dataclass
class _Block:
    """A block in use or in memory.

    Attributes:
        address: of the memory that its weights lie in; 0 while that is the file.
        users: forwards in which its weights are in memory.
        memory: its own, if it stays.
    """

    weights: tuple[_Weight, ...]
    nbytes: int
    address: int = 0
    users: int = 0
    memory: mmap.mmap | None = None

    def move_to(self, memory: mmap.mmap) -> None:
        """The weights are what was read to ``memory``, unless somebody has changed them."""
        if self.was_written():
            return
        with torch.inference_mode(mode=False):
            for weight in self.weights:
                weight.move_to(memory)
        self.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def move_back(self) -> None:
        for weight in self.weights:
            weight.move_back(self.address)
        self.address = 0

    def was_changed(self) -> bool:
        """True if somebody wrote to a weight in the block's own memory.

        Writes through ``tensor.data`` are counted nowhere: the values say it.
        """
        return any(w.tensor._version != w.version or not w.has_its_values() for w in self.weights)

    def was_written(self) -> bool:
        """True if somebody wrote to the mapping itself, which then is no longer the file's."""
        return any(was_written(w.mapped.data_ptr(), w.nbytes) for w in self.weights)


class _Using(NamedTuple):
    """What a thread's forward uses: a block, and the buffer if that is not the block's own."""

    at: int
    fill: Fill | None


class BlockStreamer:
    """Keeps as many blocks in memory as fit at the moment, and streams the others.

    Args:
        residency: what was planned.
        tensors: the model's parameters and buffers by name.
        files: by path, open; closed with this.
        available: bytes that can still be allocated.
    """

    def __init__(
        self,
        residency: Residency,
        tensors: Mapping[str, torch.Tensor],
        files: Mapping[str, AgainFile],
        available: Callable[[], int],
    ) -> None:
        self._residency = residency
        self._available = available
        self._blocks = [_Block(_weights(b, tensors), b.nbytes) for b in residency.blocks]
        inside = {planned.name for block in residency.blocks for planned in block.tensors}
        outside = [t.shape[0] for name, t in tensors.items() if t.dim() == 2 and name not in inside]
        self._vocabulary = max(outside, default=0)
        bases = _bases(residency.blocks, self._blocks)

        def is_cached(file: str, offset: int, nbytes: int) -> bool:
            return are_resident(bases[file] + offset, nbytes)

        self._reader = BlockReader(residency.blocks, files, is_cached)
        self._reader.keep(frozenset(residency.order[: residency.resident]))
        self._stay = residency.resident
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._mine = threading.local()
        weakref.finalize(self, _close, self._reader, files)

    def before_pass(self, _model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep as many blocks as there is room for beside what this pass will take."""
        if self._is_elsewhere():
            return
        order = self._residency.order
        with self._lock:
            stay = self._stay
            spare = self._available() - self._residency.always_bytes
            spare -= self._reader.coming_bytes() + self._coming_bytes(args, kwargs)
            while spare < 0 and stay:
                stay -= 1
                spare += self._size(order[stay])
            while stay < len(order) and spare >= self._size(order[stay]) + MARGIN_BYTES // 4:
                spare -= self._size(order[stay])
                stay += 1
            is_other, self._stay = stay != self._stay, stay
            for at in order[stay:]:
                self._let_go(at)
            if is_other:
                self._reader.keep(frozenset(order[:stay]))

    def before_block(self, at: int) -> None:
        """Bring the block's weights into memory, if they are not there."""
        if self._is_elsewhere():
            return
        self._finish()  # what an interrupt left behind
        block = self._blocks[at]
        with self._lock:
            if block.memory is not None:
                block.users += 1
                self._mine.using = _Using(at, None)
                return
        # What autograd keeps for a backward pass must not change, and buffers of the ring do.
        if torch.is_grad_enabled():
            return
        fill = self._reader.take(at)
        if fill is None:
            return
        with self._lock:
            self._mine.using = _Using(at, fill)
            block.users += 1
            if not block.address:
                block.move_to(fill.memory)

    def after_block(self, output: object) -> object:
        """Give the block's buffer back, or keep it; the output, if that lay in it, as a copy."""
        using: _Using | None = getattr(self._mine, "using", None)
        owned = None
        if using is not None and using.fill is not None:
            start = self._blocks[using.at].address
            copied = _without_views(output, range(start, start + self._size(using.at)))
            owned = None if copied is output else copied
        self._finish()
        return owned

    def _finish(self) -> None:
        """The calling thread uses no block any more."""
        using: _Using | None = getattr(self._mine, "using", None)
        self._mine.using = None
        if using is None:
            return
        with self._lock:
            block, fill = self._blocks[using.at], using.fill
            block.users -= 1
            if fill is None:
                return
            stays = fill.stays and using.at in self._residency.order[: self._stay]
            if stays:
                block.memory = fill.memory
            elif not block.users:
                block.move_back()
            self._reader.give_back(fill, stays=stays)

    def _let_go(self, at: int) -> None:
        """The block no longer stays, unless it is in use just now or was written to."""
        block = self._blocks[at]
        if block.memory is not None and not block.users and not block.was_changed():
            block.move_back()
            block.memory = None

    def _is_elsewhere(self) -> bool:
        """True in a child process, which has not the threads: there all is mapped."""
        return os.getpid() != self._process

    def _size(self, at: int) -> int:
        return self._blocks[at].nbytes

    def _coming_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """What activations, logits, and keys and values will take, rather too much than too few."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        rows = max(map(_rows, tensors), default=1)
        widths = [block.widths for block in self._residency.blocks]
        # Until the cache knows better: as if each head had keys and values of its own.
        itemsize = max(w.mapped.element_size() for b in self._blocks for w in b.weights)
        row_bytes = 2 * max(narrow for narrow, _ in widths) * itemsize * len(widths)
        caches = [value for value in kwargs.values() if hasattr(value, "unfilled_rows")]
        for cache in caches:
            row_bytes = cache.row_bytes or row_bytes
        coming = row_bytes * max([cache.unfilled_rows for cache in caches] or [rows])
        wide = _ROWS * max(wide for _, wide in widths)
        wide += 0 if kwargs.get("last_only") else self._vocabulary
        return int(coming + rows * wide * _WIDEST_ITEM)


def _rows(tensor: torch.Tensor) -> int:
    """Positions in a pass' input: ids, or vectors."""
    if tensor.is_floating_point():
        return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() > 1 else 1
    return tensor.numel() if tensor.dim() <= 2 else 1


class _Hook:
    """A hook that a copy of the model does not take along: the copy is not mapped."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> object:
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: object) -> None:
    """What becomes of a hook in a copy."""


def attach(
    model: nn.Module,
    residency: Residency,
    files: Mapping[str, AgainFile],
    *,
    available: Callable[[], int],
) -> None:
    """Have the model's blocks streamed from now on, as far as they do not fit.

    Args:
        model: whose weights are mapped as planned.
        residency: which blocks there are, and which stay.
        files: by path, open; they are the model's from then on.
        available: bytes that can still be allocated.
    """
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    streamer = BlockStreamer(residency, tensors, files, available)
    model.register_forward_pre_hook(_Hook(streamer.before_pass), with_kwargs=True)
    for at, block in enumerate(residency.blocks):
        module = model.get_submodule(block.path)
        module.register_forward_pre_hook(_Hook(lambda *_, at=at: streamer.before_block(at)))
        after = _Hook(lambda _module, _args, output: streamer.after_block(output))
        module.register_forward_hook(after, always_call=True)


def _weights(block: MappedBlock, tensors: Mapping[str, torch.Tensor]) -> tuple[_Weight, ...]:
    found = zip(block.tensors, block.places, strict=True)
    named = ((tensors[planned.name], place) for planned, place in found)
    return tuple(_Weight(t, t.data, t._version, place) for t, place in named)


def _bases(planned: Iterable[MappedBlock], blocks: Iterable[_Block]) -> dict[str, int]:
    """Where each file is mapped."""
    return {
        extent.file: weight.mapped.data_ptr() - extent.offset
        for block, found in zip(planned, blocks, strict=True)
        for extent, weight in zip(block.extents, found.weights, strict=True)
    }


def _without_views(output: object, inside: range) -> object:
    """The output, of which nothing is a view of the buffer, which will be overwritten."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output.data_ptr() in inside else output
    if isinstance(output, (tuple, list)) and type(output) in (tuple, list):
        parts = [_without_views(part, inside) for part in output]
        if any(new is not old for new, old in zip(parts, output, strict=True)):
            return type(output)(parts)
    return output


def _close(reader: BlockReader, files: Mapping[str, AgainFile]) -> None:
    reader.stop()
    for file in files.values():
        file.close()
