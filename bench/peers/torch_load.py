"""torch.load of the same tensors saved with torch.save."""

from typing import Any

from bench.own_files import bin_path, make_bin

LABEL = "torch.load"
DELIVERS = "tensors, stored layout (.bin)"
prepare = make_bin


def load(job: Any) -> Any:
    import torch

    found = torch.load(bin_path(job), map_location="cpu", weights_only=True)
    for name in found:  # one by one, so that the old one can go
        found[name] = job.cast(found[name])
    return found
