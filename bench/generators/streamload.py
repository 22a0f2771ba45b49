"""streamload: its reference model, greedy, with its key/value cache."""

from collections.abc import Iterator
from typing import Any

LABEL = "streamload"
DELIVERS = "tokens"
IMPORTS = ("torch", "streamload")


def load(job: Any) -> Any:
    import streamload

    return streamload.load(job.path, dtype=job.dtype, workers=job.workers).model


def tokens(job: Any, ids: list[int], count: int) -> Iterator[int]:
    import streamload

    return streamload.generate(load(job), ids, max_new_tokens=count)
