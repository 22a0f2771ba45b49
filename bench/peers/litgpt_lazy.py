"""The lazy loading that litgpt's converters use, from lightning: read when asked for."""

from __future__ import annotations

from typing import Any

from bench.own_files import bin_path
from bench.own_files import make_bin as prepare

__all__ = ["DELIVERS", "IMPORTS", "LABEL", "imports", "load", "prepare"]

LABEL = "litgpt lazy load"
DELIVERS = "tensors, stored layout (.bin)"
IMPORTS = ("torch", "lightning.fabric.utilities.load")


def imports() -> None:
    # Of litgpt only this one function is needed, and it lives in lightning.
    import torch  # noqa: F401
    from lightning.fabric.utilities.load import _lazy_load  # noqa: F401


def load(job: Any) -> Any:
    from lightning.fabric.utilities.load import _lazy_load

    found = _lazy_load(bin_path(job))
    return {name: job.cast(found[name]._load_tensor()) for name in job.entries}
