"""Streams large checkpoints into PyTorch models with little memory and no waiting."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"

# Module → the public names defined in it; type checkers and editors read them in __init__.pyi.
# Imported on first use, so that listing a checkpoint
# (``open_checkpoint``, ``streamload inspect``) imports neither torch nor numpy.
_HOMES = {
    "core.errors": "CheckpointError CheckpointNotFoundError DownloadError MemoryBudgetError "
    "MissingExtraError PlanError RankError ReadError StreamloadError WriteError",
    "core.options": "LoadOptions",
    "core.report": "ExportReport LoadReport",
    "generation.sampling": "generate",
    "loading.calls": "Loaded load load_into load_state_dict plan",
    "loading.iterating": "iter_tensors",
    "loading.transformers_load": "load_transformers",
    "mapping.chaining": "Chain",
    "mapping.combining": "Concat HeadSplit Mean Split Stack Sum Unstack",
    "mapping.tables.registry": "mapping_for",
    "mapping.rules": "NameMap Rule",
    "mapping.transforms": "Flatten Identity Interleaved Permute Transpose Unflatten",
    "module.empty_weights": "empty_weights",
    "planning.records": "Plan",
    "saving.converting": "convert",
    "saving.exporting": "export",
    "sources.base": "Source",
    "sources.detect": "open_checkpoint",
    "sources.in_memory": "MemorySource",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


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
