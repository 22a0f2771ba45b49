"""streamload: what its command does, greedy, with its key/value cache."""

from collections.abc import Iterator
from typing import Any

LABEL = "streamload"
DELIVERS = "tokens"
IMPORTS = ("torch", "streamload")


def load(job: Any) -> Any:
    # As `streamload generate` does it, which begins before torch is imported.
    from streamload.cli.model_choice import load_model

    options = {"dtype": job.dtype, "workers": job.workers}
    given = {name: value for name, value in options.items() if value is not None}
    return load_model(job.path, by_transformers=False, **given).model


def tokens(job: Any, ids: list[int], count: int) -> Iterator[int]:
    model = load(job)
    import streamload

    return streamload.generate(model, ids, max_new_tokens=count)
