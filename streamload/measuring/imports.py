"""Everything a load imports, so that imports are not timed as loading."""

from __future__ import annotations

import importlib

__all__ = ["import_for_loads"]

# What ``streamload.load`` leaves until a checkpoint asks for it.
_LATE = (
    "streamload.loading.calls",
    "streamload.models.gpt",
    "streamload.models.llama_model",
    "streamload.models.neox_model",
    "streamload.sources.neox.partitions",
    "streamload.sources.torch.zip_source",
)


def import_for_loads() -> None:
    """Import torch, and the parts of the package that loads use."""
    import torch  # noqa: F401

    for name in _LATE:
        importlib.import_module(name)
