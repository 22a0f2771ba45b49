"""torch.load of the same tensors saved with torch.save."""

from __future__ import annotations

from typing import Any

from bench.own_files import bin_path, make_bin

LABEL = "torch.load"
DELIVERS = "tensors, stored layout (.bin)"


def prepare(job: Any) -> None:
    make_bin(job)


def load(job: Any) -> Any:
    import torch

    found = torch.load(bin_path(job), map_location="cpu", weights_only=True)
    for name in found:  # one by one, so that the old one can go
        found[name] = job.cast(found[name])
    return found
