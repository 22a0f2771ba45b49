"""Copies of a checkpoint in the formats some peers read; made once, before anything is timed."""

import os
from collections.abc import Callable
from typing import Any

from bench.job import Job


def bin_path(job: Job) -> str:
    return os.path.join(job.own_dir, "pytorch_model.bin")


def make_bin(job: Job) -> None:
    """All of the checkpoint's tensors in one ``torch.save`` file, as published ones have them."""
    import torch

    make_once(bin_path(job), job, torch.save)


def make_once(path: str, job: Job, write: Callable[[dict[str, Any], str], object]) -> None:
    """Lets ``write`` put all tensors into a file at ``path``, unless there is one."""
    from safetensors.torch import load_file

    if not os.path.exists(path):
        os.makedirs(job.own_dir, exist_ok=True)
        write({n: t for file in job.files for n, t in load_file(file).items()}, path + ".part")
        os.replace(path + ".part", path)
