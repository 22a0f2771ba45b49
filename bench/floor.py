"""The floor of a load, of what a model needs of the job's files."""

from __future__ import annotations

from typing import Any

from bench.job import Job
from bench.safetensors_header import TORCH_NAMES
from streamload.measuring import floor


def read_only(job: Job) -> dict[str, Any]:
    """Reads everything, keeps nothing."""
    floor.read_only(_pieces(job), workers=job.workers)
    return {}


def read_and_cast(job: Job) -> dict[str, Any]:
    """Reads everything into new tensors of the job's dtype."""
    return floor.read_and_cast(_pieces(job), job.torch_dtype(), workers=job.workers)


def _pieces(job: Job) -> list[floor.Piece]:
    return [
        floor.Piece(name, e.file, e.offset, e.nbytes, TORCH_NAMES[e.dtype], e.shape)
        for name, e in job.entries.items()
    ]
