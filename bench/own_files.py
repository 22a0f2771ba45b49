"""Copies of a checkpoint in the formats some peers read; made once, before anything is timed."""

from __future__ import annotations

import os
from typing import Any

from bench.job import Job


def bin_path(job: Job) -> str:
    return os.path.join(job.own_dir, "pytorch_model.bin")


def make_bin(job: Job) -> None:
    """All of the checkpoint's tensors in one ``torch.save`` file, as published ones have them."""
    import torch

    path = bin_path(job)
    if not os.path.exists(path):
        os.makedirs(job.own_dir, exist_ok=True)
        torch.save(all_tensors(job), path + ".part")
        os.replace(path + ".part", path)


def all_tensors(job: Job) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in job.files:
        found.update(load_file(file))
    return found
