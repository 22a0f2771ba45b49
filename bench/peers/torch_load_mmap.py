"""torch.load with mmap=True, leaving out what the model does not need."""

from typing import Any

from bench.own_files import bin_path, make_bin

LABEL = "torch.load mmap"
DELIVERS = "tensors, stored layout (.bin)"
prepare = make_bin


def load(job: Any) -> Any:
    import torch

    names = set(job.entries)
    found = torch.load(bin_path(job), map_location="cpu", weights_only=True, mmap=True)
    return {name: job.cast(found.pop(name)) for name in list(found) if name in names}
