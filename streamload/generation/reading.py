"""How a model reads a text that grows: with its own cache where it has one, else anew each time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# Takes what is new of the text, [1, n]; gives logits of its last position, or what has them.
Reader: TypeAlias = Callable[[Tensor], Any]

# transformers' names: of the cache that goes in and comes out, today's and that of releases
# before 5.24 (and of models written for them); and of whether one is wanted.
_CACHES, _WANTED = ("cache", "past_key_values"), "use_cache"
# Some classes count positions from 0 in each call, unless told.
_POSITIONS = "position_ids"
# Positions that leave padding out and begin behind its id, as RoBERTa's, can only be counted by the
# class that has this, from the whole text.
_OWN_COUNT = "create_position_ids_from_inputs_embeds"


def reader_of(model: nn.Module, length: int) -> Reader:
    """A reader of one text of at most ``length`` tokens, from its beginning."""
    new_cache: Any = getattr(model, "new_cache", None)
    if new_cache is None:
        return _Growing(model)
    cache = new_cache(1, length)
    return lambda new: model(new, cache=cache, last_only=True)


class _Growing:
    """Reads by a module that is not of ours.

    A cache that its class takes and gives back is handed on from call to call. Where it gives none
    (some keep a state of another kind), or counts positions in its own way, the whole text is read
    each time.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        is_two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        counts = any(hasattr(module, _OWN_COUNT) for module in model.modules())
        takes = _WANTED in parameters and not is_two and not counts
        self._model = model
        self._name = next((n for n in _CACHES if n in parameters and takes), "")
        self._takes_positions = _POSITIONS in parameters
        self._cache: Any = None
        self._text: Tensor | None = None

    def __call__(self, new: Tensor) -> Any:
        before = 0 if self._text is None else self._text.shape[1]
        self._text = new if self._text is None else torch.cat((self._text, new), dim=1)
        more: dict[str, Any] = {_WANTED: True} if self._name else {}
        if self._cache is not None:
            more[self._name] = self._cache
            if self._takes_positions:
                positions = torch.arange(before, self._text.shape[1], device=new.device)
                more[_POSITIONS] = positions[None]
        out = self._model(self._text if self._cache is None else new, **more)
        self._cache = getattr(out, self._name, None) if self._name else None
        if self._cache is None:
            self._name = ""
        return out
