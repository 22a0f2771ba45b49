"""An empty reference model for a checkpoint, and the job of loading it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from streamload.core.errors import MemoryBudgetError, PlanError
from streamload.core.options import Settings
from streamload.core.wording import format_bytes, printable
from streamload.loading.resolving import Job, resolve
from streamload.mapping.configuration import config_to_build, refuse_too_many_layers
from streamload.mapping.tables.chosen_layers import LayersError, select_layers
from streamload.mapping.tables.registry import build_model
from streamload.module.empty_weights import empty_weights
from streamload.sources.base import Source
from streamload.system.memory import available_memory

# Has an empty model sharded; may say which device its parts go to.
Prepare: TypeAlias = Callable[[nn.Module], object]

# What torch says where its allocators give up, which is no MemoryError.
_NO_MEMORY = re.compile(r"out of memory|allocate memory|not enough memory", re.IGNORECASE)
_BYTES = re.compile(r"allocate (\d+) bytes")


def _no_memory(path: str, error: Exception) -> MemoryBudgetError:
    needed = _BYTES.search(str(error))
    there = available_memory()
    return MemoryBudgetError(
        f"{printable(path)}: there is not enough memory to build the model that config.json "
        f"describes; {format_bytes(there.bytes)} are available ({there.limit} limit)",
        needed_bytes=int(needed[1]) if needed else 0,
        available_bytes=there.bytes,
        limit=there.limit,
    )


def find_config(source: Source) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration a model of the checkpoint is built from; see ``config_to_build``."""
    return config_to_build(source.config(), source.catalog, path=source.path)


def build(
    source: Source, settings: Settings, prepare: Prepare | None = None
) -> tuple[nn.Module, dict[str, Any], Job]:
    """The empty reference model, its configuration, and its load.

    The model and its configuration are of just the chosen layers, if some are chosen. ``prepare``
    is called with the model before its load is settled.

    Raises:
        CheckpointError: there is no configuration, or none of a model here.
        PlanError: no model can be built of it.
    """
    file_config, notices = find_config(source)
    config = file_config
    refuse_too_many_layers(file_config, source.catalog, path=source.path, chosen=settings.layers)
    try:
        if settings.layers is not None:
            config = select_layers(config, sorted(settings.layers))
            settings = replace(settings, renumber=True)
        with empty_weights():
            model = build_model(config["model_type"], config)
    except LayersError as error:
        raise PlanError(printable(f"{source.path}: {error}")) from error
    except MemoryError as error:
        raise _no_memory(source.path, error) from error
    # torch's own errors, for absurd sizes, have its C++ stack on further lines.
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
            raise _no_memory(source.path, error) from error
        first = str(error).partition("\n")[0]
        text = printable(f"{source.path}: config.json: {first}")
        raise PlanError(text) from error
    if prepare is not None:
        prepare(model)
    job = resolve(source, model, settings, file_config, notices=notices)
    return model, config, job
