"""Checking what was loaded against the file."""

import os
from typing import Any

from bench.job import Job
from streamload.measuring.floor import Piece

FULL_BYTES = 256 << 20
"""Files up to this are compared whole, larger ones in samples."""
SAMPLE_ELEMENTS = 8192
SAMPLES = 16
"""Runs of elements compared per tensor of a larger file, the first and the last among them."""


def check(stored: dict[str, Any], job: Job) -> str:
    """``"right"``, or what is wrong first: all names are there, all values as in the file.

    The values expected are read here, by offset, and cast with ``tensor.to``; NaN equals NaN.
    """
    entries = job.entries
    whole = sum(os.path.getsize(file) for file in job.files) <= FULL_BYTES
    for name, entry in entries.items():
        tensor = _find(stored, name)
        if tensor is None:
            return f"wrong: no {name}"
        if tuple(tensor.shape) != entry.shape:
            return f"wrong: shape of {name}"
        if tensor.dtype != entry.torch_dtype(job.torch_dtype()):
            return f"wrong: dtype of {name}"
        if not all(_same(tensor, entry, *run) for run in _runs(entry, whole)):
            return f"wrong: {name}"
    return "right"


def _find(stored: dict[str, Any], name: str) -> Any:
    if name == "embed_out.weight" and name not in stored:  # GPT-NeoX's head, as it was once called
        name = "lm_head.weight"
    for wrapper in ("", "transformer.", "model.", "gpt_neox."):
        if wrapper + name in stored:
            return stored[wrapper + name]
        if wrapper and name.startswith(wrapper) and name[len(wrapper) :] in stored:
            return stored[name[len(wrapper) :]]
    return None


def _runs(entry: Piece, whole: bool) -> list[tuple[int, int]]:
    """(first element, count) of what is compared."""
    count = entry.nbytes // entry.torch_dtype().itemsize
    if whole or count <= SAMPLE_ELEMENTS * SAMPLES:
        step = 1 << 22
        return [(start, min(step, count - start)) for start in range(0, count, step)]
    gap = (count - SAMPLE_ELEMENTS) / (SAMPLES - 1)
    return [(round(i * gap), SAMPLE_ELEMENTS) for i in range(SAMPLES)]


def _same(tensor: Any, entry: Piece, start: int, count: int) -> bool:
    import torch

    itemsize = entry.torch_dtype().itemsize
    with open(entry.file, "rb") as file:
        file.seek(entry.offset + start * itemsize)
        raw = bytearray(file.read(count * itemsize))
    expected = torch.frombuffer(raw, dtype=entry.torch_dtype()).to(tensor.dtype)
    with torch.inference_mode():
        found = _elements(tensor, start, count)
        if not tensor.is_floating_point():
            return bool(torch.equal(found, expected))
        wide, right = found.to(torch.float64), expected.to(torch.float64)
        return bool(((wide == right) | (wide.isnan() & right.isnan())).all())


def _elements(tensor: Any, start: int, count: int) -> Any:
    """Elements ``[start, start + count)`` in row-major order of a tensor of any strides."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start : start + count]
    width = tensor.numel() // tensor.shape[0]
    first, last = start // width, -(-(start + count) // width)
    skipped = start - first * width
    return tensor[first:last].reshape(-1)[skipped : skipped + count]
