"""Streams large checkpoints into PyTorch models with little memory and no waiting."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamload.core.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        DownloadError,
        MemoryBudgetError,
        MissingExtraError,
        PlanError,
        ReadError,
        StreamloadError,
        WriteError,
    )
    from streamload.core.options import LoadOptions
    from streamload.core.report import ExportReport, LoadReport
    from streamload.generation.sampling import generate
    from streamload.loading.calls import (
        Loaded,
        load,
        load_into,
        load_state_dict,
        plan,
    )
    from streamload.loading.iterating import iter_tensors
    from streamload.mapping.combining import Chain, Concat, HeadSplit, Mean, Split, Sum
    from streamload.mapping.registry import mapping_for
    from streamload.mapping.rules import NameMap, Rule
    from streamload.mapping.transforms import Identity, Interleaved, Permute, Transpose
    from streamload.module.empty_weights import empty_weights
    from streamload.planning.records import Plan
    from streamload.saving.converting import convert
    from streamload.saving.exporting import export
    from streamload.sources.base import Source
    from streamload.sources.detect import open_checkpoint
    from streamload.sources.in_memory import MemorySource

__version__ = "0.1.0"

# Public name → the module it is defined in. Imported on first use, so that listing a checkpoint
# (``open_checkpoint``, ``streamload inspect``) imports neither torch nor numpy.
_HOMES = {
    "saving.converting": ("convert",),
    "core.errors": (
        "CheckpointError",
        "CheckpointNotFoundError",
        "DownloadError",
        "MemoryBudgetError",
        "MissingExtraError",
        "PlanError",
        "ReadError",
        "StreamloadError",
        "WriteError",
    ),
    "saving.exporting": ("export",),
    "generation.sampling": ("generate",),
    "loading.iterating": ("iter_tensors",),
    "loading.calls": ("Loaded", "load", "load_into", "load_state_dict", "plan"),
    "mapping.registry": ("mapping_for",),
    "mapping.rules": ("NameMap", "Rule"),
    "mapping.combining": ("Chain", "Concat", "HeadSplit", "Mean", "Split", "Sum"),
    "mapping.transforms": ("Identity", "Interleaved", "Permute", "Transpose"),
    "core.options": ("LoadOptions",),
    "planning.records": ("Plan",),
    "core.report": ("ExportReport", "LoadReport"),
    "sources.base": ("Source",),
    "sources.detect": ("open_checkpoint",),
    "sources.in_memory": ("MemorySource",),
    "module.empty_weights": ("empty_weights",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Chain",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Concat",
    "DownloadError",
    "ExportReport",
    "HeadSplit",
    "Identity",
    "Interleaved",
    "LoadOptions",
    "LoadReport",
    "Loaded",
    "Mean",
    "MemoryBudgetError",
    "MemorySource",
    "MissingExtraError",
    "NameMap",
    "Permute",
    "Plan",
    "PlanError",
    "ReadError",
    "Rule",
    "Source",
    "Split",
    "StreamloadError",
    "Sum",
    "Transpose",
    "WriteError",
    "convert",
    "empty_weights",
    "export",
    "generate",
    "iter_tensors",
    "load",
    "load_into",
    "load_state_dict",
    "mapping_for",
    "open_checkpoint",
    "plan",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    # Who has imported torch is about to load something: what that needs of our own is imported
    # here, so that the first load takes no longer than the second.
    for _name in (
        "loading.calls",
        "models.gpt",
        "sources.mapped_file",
        "sources.neox.partitions",
    ):
        import_module(f"{__name__}.{_name}")
