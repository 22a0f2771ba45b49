"""``quantize="int8"``: linear layers are quantised as their weights arrive, through torchao.

Weight only, symmetric, one scale for each output channel (torchao's ``Int8Tensor`` with
``PerRow``, what ``Int8WeightOnlyConfig`` makes). torchao multiplies it without a copy of the
weight in memory for longer than one product.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from streamload.core.errors import MissingExtraError
from streamload.core.specs import numel
from streamload.engine.on_layer import AHEAD, OnLayer, in_blocks
from streamload.engine.threads import use_one_torch_thread
from streamload.planning.records import Plan, PlannedTensor
from streamload.system.pages import empty_pages

__all__ = ["Quantizer", "quantizer_for"]

# What torchao takes and gives back as the weight's own dtype.
_DTYPES = ("F32", "F16", "BF16")
# Rows are quantised so many elements at a time, in float32.
_PANEL_ELEMENTS = 1 << 18
_ROW_BYTES = 5  # a float32 scale and an int8 zero point
_NOISY = ("torchao", "torch")


@dataclass(frozen=True)
class Quantizer:
    """Quantises the weights of a plan as they come.

    Attributes:
        names: target names of the weights that are quantised.
        workers: threads that do so where the weights are in host memory.
    """

    names: frozenset[str]
    workers: int

    def wrap(self, on_layer: OnLayer | None) -> OnLayer:
        """An ``on_layer`` that lets the caller's own go first, and leaves alone what it gives."""

        def quantize(layer: int | None, tensors: dict[str, torch.Tensor]) -> object:
            given = None if on_layer is None else on_layer(layer, dict(tensors))
            if given is not None and not isinstance(given, dict):
                return given  # refused where the answer is read
            made: dict[str, object] = dict(given or {})
            swapped = tuple(f"{name}." for name, v in made.items() if isinstance(v, nn.Module))
            todo = {
                name: tensor
                for name, tensor in tensors.items()
                if name in self.names and name not in made and not name.startswith(swapped)
            }
            return made | _all_quantized(todo, self.workers)

        return quantize

    def refine(self, plan: Plan) -> Plan:
        """The plan with the memory, the ledger and a notice of what is quantised."""
        report = plan.report
        here = [t for t in plan.tensors if t.name in self.names and t.device == "cpu"]
        saved = sum(map(_saved_bytes, here))
        waiting = sorted(sum(t.nbytes for t in part) for _, part in in_blocks(here))
        needed = (
            report.memory.needed_bytes
            - saved
            + sum(waiting[-AHEAD:])
            + 4 * _PANEL_ELEMENTS * self.workers
        )
        loaded = tuple(
            replace(entry, dtype="int8") if entry.name in self.names else entry
            for entry in report.loaded
        )
        count = len(self.names)
        notice = (
            f"{count} linear layer{'s' if count != 1 else ''} quantised to int8 (weight only, one "
            f"scale for each output channel); all else is {report.dtype or 'of mixed dtypes'}"
        )
        return replace(
            plan,
            report=replace(
                report,
                loaded=loaded,
                notices=(*report.notices, notice),
                memory=replace(report.memory, needed_bytes=needed),
            ),
        )


def quantizer_for(module: nn.Module, plan: Plan) -> Quantizer:
    """What ``quantize="int8"`` makes of a module's plan; imports torchao.

    A weight that is also something else's (a head tied to the embedding) is left as it is.

    Raises:
        MissingExtraError: torchao is not installed, or too old.
    """
    _int8_tensor()
    linear: dict[str, bool] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute in owner._parameters:
            is_weight = isinstance(owner, nn.Linear) and attribute == "weight"
            linear[f"{path}.{attribute}" if path else attribute] = is_weight
    return Quantizer(
        frozenset(
            t.name
            for t in plan.tensors
            if t.is_new
            and t.dtype in _DTYPES
            and len(t.shape) == 2
            and numel(t.shape)
            and all(linear.get(name, False) for name in (t.name, *t.aliases))
        ),
        plan.options.workers,
    )


def _all_quantized(weights: dict[str, torch.Tensor], workers: int) -> dict[str, nn.Parameter]:
    """All weights of a block; on a device by the calling thread, whose current stream it is."""
    if any(weight.device.type != "cpu" for weight in weights.values()):
        return {name: quantized(weight) for name, weight in weights.items()}
    # As for the readers: one torch thread each, or all of them fight for the same cores.
    with ThreadPoolExecutor(workers, initializer=use_one_torch_thread) as pool:
        return dict(zip(weights, pool.map(quantized, weights.values()), strict=True))


def quantized(weight: torch.Tensor) -> nn.Parameter:
    """The int8 form of a linear layer's weight [out, in], as a parameter without a gradient.

    The arithmetic is that of torchao's ``Int8Tensor.from_hp`` to the bit (largest magnitude of a
    row over 127.5, in the weight's dtype), but in place in one small buffer: torchao makes
    half a dozen float32 copies, which malloc keeps for each thread.
    """
    int8_tensor = _int8_tensor()
    weight = weight.detach()
    out, width = weight.shape
    low, high = torch.aminmax(weight, dim=1, keepdim=True)
    scale = (torch.maximum(-low, high) / 127.5).clamp_(min=torch.finfo(torch.float32).eps).float()
    factors = 1.0 / scale
    values = _empty_like(weight, torch.int8, out)
    rows = min(max(_PANEL_ELEMENTS // width, 1), out)
    panel = _empty_like(weight, torch.float32, rows)
    for start in range(0, out, rows):
        part = panel[: min(rows, out - start)]
        stop = start + len(part)
        part.copy_(weight[start:stop])
        values[start:stop] = part.mul_(factors[start:stop]).round_().clamp_(-128, 127)
    zeros = torch.zeros_like(scale, dtype=torch.int8)
    made = int8_tensor(values, scale, [1, width], weight.dtype, zero_point=zeros)
    return nn.Parameter(made, requires_grad=False)


def _empty_like(weight: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor:
    """[rows, in] where the weight is."""
    shape = rows, weight.shape[1]
    if weight.device.type == "cpu":
        return empty_pages(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=weight.device)


def _saved_bytes(tensor: PlannedTensor) -> int:
    """How much smaller than in the load's dtype; mapped ones were not counted at all."""
    held = 0 if tensor.mapped is not None else tensor.nbytes
    return held - numel(tensor.shape) - _ROW_BYTES * tensor.shape[0]


def _int8_tensor() -> Any:
    try:
        with _quiet():
            from torchao.quantization import Int8Tensor
    except ImportError as error:
        raise MissingExtraError("torchao>=0.16", extra="int8", purpose="quantize='int8'") from error
    return Int8Tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torchao says while it is imported from the user."""
    if "torchao.quantization" in sys.modules:
        yield
        return
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    silence = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
