"""The lazy loading that litgpt's converters use, from lightning: read when asked for."""

from typing import Any

from bench.own_files import bin_path, make_bin

LABEL = "litgpt lazy load"
DELIVERS = "tensors, stored layout (.bin)"
# Of litgpt only this one function is needed, and it lives in lightning.
IMPORTS = ("torch", "lightning.fabric.utilities.load")
prepare = make_bin


def load(job: Any) -> Any:
    from lightning.fabric.utilities.load import _lazy_load

    found = _lazy_load(bin_path(job))
    return {name: job.cast(found[name]._load_tensor()) for name in job.entries}
