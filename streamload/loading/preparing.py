"""What a load asks beyond names and shapes: devices that are there, on_layer, quantize."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from streamload.core.options import Settings
from streamload.engine.lanes.choice import unusable
from streamload.engine.on_layer import OnLayer
from streamload.module.overlap import in_place_problems
from streamload.module.quantizing import quantizer_for
from streamload.planning import Plan

__all__ = ["hook_for", "prepare"]


def prepare(plan: Plan, module: nn.Module | None, settings: Settings) -> Plan:
    """The plan with what else refuses it, and with what quantising changes.

    Raises:
        MissingExtraError: ``quantize`` without torchao.
    """
    problems = [why for device in _devices(settings) if (why := unusable(device))]
    if module is not None:
        problems += in_place_problems(module, plan)
    asked = _asked(settings)
    held = [t.name for t in plan.tensors if not t.is_new]
    if asked and held:
        problems.append(
            f"{held[0]!r} holds data and is overwritten in place, so {asked} cannot be honoured: "
            "build the module under streamload.empty_weights()"
        )
    if asked and settings.cache:
        problems.append(f"cache keeps tensors as they are stored, so {asked} needs cache=False")
    if settings.quantize is not None and plan.ok and not problems:
        if module is None:
            problems.append("quantize needs a module, whose linear layers it can tell")
        else:
            quantizer = quantizer_for(module, plan)
            if quantizer.names:
                plan = quantizer.refine(plan)
            else:
                problems.append("quantize finds no linear layer (torch.nn.Linear) to quantise")
    if not problems:
        return plan
    report = replace(plan.report, problems=(*plan.problems, *problems))
    return replace(plan, report=report)


def hook_for(plan: Plan, module: nn.Module | None, settings: Settings) -> OnLayer | None:
    """What is called with each block's tensors, if anything is; the plan must hold."""
    if settings.quantize is None or module is None:
        return settings.on_layer
    return quantizer_for(module, plan).wrap(settings.on_layer)


def _devices(settings: Settings) -> Iterable[str]:
    device = settings.device
    return (device,) if isinstance(device, str) else sorted(set(device.values()))


def _asked(settings: Settings) -> str:
    if settings.quantize is not None:
        return f"quantize={settings.quantize!r}"
    return "on_layer" if settings.on_layer is not None else ""
