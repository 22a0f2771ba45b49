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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from streamload.core.errors import MissingExtraError
from streamload.core.specs import numel
from streamload.core.wording import plural
from streamload.engine.groups import AHEAD, in_layers
from streamload.engine.on_layer import OnLayer
from streamload.engine.threads import use_one_torch_thread
from streamload.module.int8_tensor import int8_tensor
from streamload.planning.records import Plan, PlannedTensor
from streamload.system.pages import empty_pages
from streamload.system.quiet_logs import quiet_logs

# What torchao takes and gives back as the weight's own dtype.
_DTYPES = ("F32", "F16", "BF16")
# Rows are quantised so many elements at a time, in float32: few fit a core's caches, while a
# device wants enough to do in each kernel.
_PANEL_ELEMENTS = 1 << 18
_DEVICE_PANEL_ELEMENTS = 16 << 20
_ROW_BYTES = 5  # a float32 scale and an int8 zero point
_NOISY = ("torchao", "torch")


def quantized_plan(plan: Plan, module: nn.Module) -> Plan:
    """The plan with its linear weights as int8, and what that needs of memory; imports torchao.

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
    weights = [
        t
        for t in plan.tensors
        if t.is_new
        and t.dtype in _DTYPES
        and len(t.shape) == 2
        and numel(t.shape)
        and all(linear.get(name, False) for name in (t.name, *t.aliases))
    ]
    if not weights:
        return plan.refused("quantize finds no linear layer (torch.nn.Linear) to quantise")
    here = [t for t in weights if t.device == "cpu"]
    needed = (
        plan.memory.needed_bytes
        - sum(map(_saved_bytes, here))
        + _waiting_bytes(here)
        + 4 * _PANEL_ELEMENTS * plan.options.workers
    )
    return replace(
        plan,
        quantized=frozenset(t.name for t in weights),
        memory=replace(plan.memory, needed_bytes=needed),
    ).noticed(
        f"{plural(len(weights), 'linear layer')} quantised to int8 (weight only, one scale for "
        f"each output channel); all else is {plan.dtype or 'of mixed dtypes'}"
    )


def quantizing_bytes(plan: Plan, device: str) -> int:
    """What quantising takes of a device's memory beside the int8 weights."""
    weights = [t for t in plan.tensors if t.name in plan.quantized and t.device == device]
    largest = max((numel(t.shape) for t in weights), default=0)
    scales = sum(_ROW_BYTES * t.shape[0] for t in weights)
    return _waiting_bytes(weights) + 4 * min(largest, _DEVICE_PANEL_ELEMENTS) + scales


def _waiting_bytes(weights: Sequence[PlannedTensor]) -> int:
    """Weights that are there in the load's dtype at once, since their blocks are."""
    sizes = sorted(sum(t.nbytes for t in group.tensors) for group in in_layers(weights))
    return sum(sizes[-AHEAD:])


def quantizing(plan: Plan, on_layer: OnLayer | None) -> OnLayer:
    """An ``on_layer`` that quantises what the plan says.

    It lets the caller's own go first, and leaves alone what that gives.
    """

    def quantize(layer: int | None, tensors: dict[str, torch.Tensor]) -> object:
        returned = None if on_layer is None else on_layer(layer, dict(tensors))
        if returned is not None and not isinstance(returned, dict):
            return returned  # refused where the answer is read
        replacements: dict[str, object] = dict(returned or {})
        modules = [name for name, value in replacements.items() if isinstance(value, nn.Module)]
        swapped = tuple(f"{name}." for name in modules)
        weights = {
            name: tensor
            for name, tensor in tensors.items()
            if name in plan.quantized and name not in replacements and not name.startswith(swapped)
        }
        return replacements | _all_quantized(weights, plan.options.workers)

    return quantize


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
    make = _int8_tensor()
    weight = weight.detach()
    out, width = weight.shape
    low, high = torch.aminmax(weight, dim=1, keepdim=True)
    scale = (torch.maximum(-low, high) / 127.5).clamp_(min=torch.finfo(torch.float32).eps).float()
    factors = 1.0 / scale
    values = _empty_like(weight, torch.int8, out)
    elements = _PANEL_ELEMENTS if weight.device.type == "cpu" else _DEVICE_PANEL_ELEMENTS
    rows = min(max(elements // width, 1), out)
    panel = _empty_like(weight, torch.float32, rows)
    for start in range(0, out, rows):
        part = panel[: min(rows, out - start)]
        stop = start + len(part)
        part.copy_(weight[start:stop])
        values[start:stop] = part.mul_(factors[start:stop]).round_().clamp_(-128, 127)
    zeros = torch.zeros_like(scale, dtype=torch.int8)
    made = make(values, scale, [1, width], weight.dtype, zero_point=zeros)
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
            return int8_tensor()
    except ImportError as error:
        raise MissingExtraError("torchao>=0.16", extra="int8", purpose="quantize='int8'") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torchao says while it is imported from the user."""
    if "torchao.quantization" in sys.modules:
        yield
        return
    silence = io.StringIO()
    with (
        quiet_logs(*_NOISY, below=logging.CRITICAL),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        warnings.simplefilter("ignore")
        yield
