"""``distributed_config``: an empty model of transformers, laid out over ranks by that library."""

from __future__ import annotations

from typing import Any

from streamload.core.errors import PlanError


def distribute(model: Any, config: Any) -> str:
    """Make an empty model's parameters DTensors by the library's own plans; ties stay.

    Args:
        model: of transformers, on meta.
        config: its DistributedConfig, or a dict of one's fields.

    Returns:
        The device that this rank's parts go to.

    Raises:
        PlanError: the library is too old for it, or cannot lay this model out so.
    """
    kind = type(model)
    if not hasattr(kind, "maybe_distribute_model"):
        raise PlanError(
            f"this version of transformers has no distributed_config for {kind.__name__}"
        )
    try:
        config, device, meshes = kind.prepare_distribute_model(config)
        if (config.pp_size or 1) > 1:
            raise PlanError(
                "distributed_config: pp_size cuts a model by layers, which is not loaded here"
            )
        _untie(model)  # as it is where the library does this
        kind.maybe_distribute_model(model, config, meshes)
        model.tie_weights()
    except PlanError:
        raise
    except Exception as error:  # whatever the library finds wrong with the plan or the ranks
        first = str(error).partition("\n")[0]
        raise PlanError(f"distributed_config: {type(error).__name__}: {first}") from error
    return "cpu" if device is None else str(device)


def _untie(model: Any) -> None:
    """Give every name a parameter of its own."""
    from torch import empty_like, nn

    seen: set[int] = set()
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and id(tensor) in seen:
                module._parameters[name] = nn.Parameter(empty_like(tensor), tensor.requires_grad)
            elif tensor is not None:
                seen.add(id(tensor))
