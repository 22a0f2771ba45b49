"""transformers' own model, greedy, with its key/value cache."""

from collections.abc import Iterator
from typing import Any

from bench.peers.transformers import IMPORTS as IMPORTS
from bench.peers.transformers import load as load

LABEL = "transformers"
DELIVERS = "tokens"
PUBLISHED = True


def tokens(job: Any, ids: list[int], count: int) -> Iterator[int]:
    import torch

    model = load(job)
    step, cache = torch.tensor([ids]), None
    with torch.inference_mode():
        for _ in range(count):
            out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            step = out.logits[:, -1].argmax(-1, keepdim=True)
            yield int(step)
