"""What the peers of streamload's modes share."""

from __future__ import annotations

from typing import Any

from bench.job import Job
from streamload.measuring.imports import import_for_loads as imports

__all__ = ["imports", "load", "stored"]


def load(job: Job, **options: Any) -> Any:
    import streamload

    return streamload.load(job.path, dtype=job.dtype, workers=job.workers, **options)


def stored(loaded: Any, job: Job) -> dict[str, Any]:
    """The model's tensors under the file's names, as the report says where each one went."""
    tensors = dict(loaded.model.state_dict())
    entries, found = job.entries, {}
    for row in loaded.report.to_dict()["loaded"]:
        tensor = tensors[row["name"]]
        if "transpose" in str(row["transform"]):
            tensor = tensor.t()
        start = 0
        for source in row["sources"]:  # several were joined along their first dimension
            rows = entries[source].shape[0] if entries[source].shape else 1
            found[source] = tensor[start : start + rows] if len(row["sources"]) > 1 else tensor
            start += rows
    for group in loaded.report.to_dict()["tied"]:
        # Of a tie that is in the file twice the report lists the name that was read; the other
        # one was compared with it, and is the same tensor of the model now.
        found.update({name: tensors[name] for name in group if name not in found})
    return found
