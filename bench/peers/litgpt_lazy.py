"""The lazy loading that litgpt's converters use: each tensor is read when asked for."""

from __future__ import annotations

from typing import Any

from bench.own_files import bin_path, make_bin

LABEL = "litgpt lazy load"
DELIVERS = "tensors, stored layout (.bin)"
IMPORTS = ("torch", "litgpt", "lightning.fabric.utilities.load")


def imports() -> None:
    # Importing litgpt itself brings in its models; its converters need this one function.
    import torch  # noqa: F401
    from lightning.fabric.utilities.load import _lazy_load  # noqa: F401


def prepare(job: Any) -> None:
    make_bin(job)


def load(job: Any) -> Any:
    from lightning.fabric.utilities.load import _lazy_load

    found = _lazy_load(bin_path(job))
    return {name: job.cast(found[name]._load_tensor()) for name in job.entries}
