"""Streams large checkpoints into PyTorch models with little memory and no waiting."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers, to whom "as" says that a name is public. isort would give each a line.
# isort: off
if TYPE_CHECKING:
    from streamload.core.errors import (
        CheckpointError as CheckpointError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        DownloadError as DownloadError,
        MemoryBudgetError as MemoryBudgetError,
        MissingExtraError as MissingExtraError,
        PlanError as PlanError,
        RankError as RankError,
        ReadError as ReadError,
        StreamloadError as StreamloadError,
        WriteError as WriteError,
    )
    from streamload.core.options import LoadOptions as LoadOptions
    from streamload.core.report import ExportReport as ExportReport, LoadReport as LoadReport
    from streamload.generation.sampling import generate as generate
    from streamload.loading.calls import (
        Loaded as Loaded,
        load as load,
        load_into as load_into,
        load_state_dict as load_state_dict,
        plan as plan,
    )
    from streamload.loading.iterating import iter_tensors as iter_tensors
    from streamload.loading.transformers_load import load_transformers as load_transformers
    from streamload.mapping.chaining import Chain as Chain
    from streamload.mapping.combining import (
        Concat as Concat,
        HeadSplit as HeadSplit,
        Mean as Mean,
        Split as Split,
        Stack as Stack,
        Sum as Sum,
        Unstack as Unstack,
    )
    from streamload.mapping.tables.registry import mapping_for as mapping_for
    from streamload.mapping.rules import NameMap as NameMap, Rule as Rule
    from streamload.mapping.transforms import (
        Flatten as Flatten,
        Identity as Identity,
        Interleaved as Interleaved,
        Permute as Permute,
        Transpose as Transpose,
        Unflatten as Unflatten,
    )
    from streamload.module.empty_weights import empty_weights as empty_weights
    from streamload.planning.records import Plan as Plan
    from streamload.saving.converting import convert as convert
    from streamload.saving.exporting import export as export
    from streamload.sources.base import Source as Source
    from streamload.sources.detect import open_checkpoint as open_checkpoint
    from streamload.sources.in_memory import MemorySource as MemorySource
# isort: on

__version__ = "0.2.0.dev0"

# Module → the public names defined in it. Imported on first use, so that listing a checkpoint
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
