"""The way of the data through any of the reference models; a family adds its own blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from streamload.models.config_fields import ModelConfig
from streamload.models.layers import KVCache, Span, embedding
from streamload.models.rotary import RotaryTables

_Model = TypeVar("_Model", bound="Decoder")


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; ``lm_head.weight`` is ``tok_embed.weight`` when tied.

    A block is called as ``block(x, span, cache)``. Modules may lie on different devices: the
    activations follow them. With rotary positions nothing limits the context: beyond
    ``max_position_embeddings`` the model computes, at whatever quality.
    """

    config_class: ClassVar[type[ModelConfig]]

    def __init__(self, config: Any, width: int, rotary: RotaryTables | None = None) -> None:
        super().__init__()
        self.config = config
        self._rotary = rotary
        self.tok_embed = embedding(config.vocab_size, width)

    def _add_blocks(self, blocks: Iterable[nn.Module], final_ln: nn.Module) -> None:
        vocabulary, width = self.tok_embed.weight.shape
        self.blocks = nn.ModuleList(blocks)
        self.final_ln = final_ln
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.tok_embed.weight

    @classmethod
    def from_config(cls: type[_Model], config: Mapping[str, Any]) -> _Model:
        """The model that a ``config.json`` describes, with random weights.

        Raises:
            ValueError: see ``ModelConfig.from_dict``.
        """
        return cls(cls.config_class.from_dict(config))  # type: ignore[call-arg]

    @classmethod
    def layer_types(cls, config: Mapping[str, Any]) -> list[str] | None:  # noqa: ARG003
        """The type of each layer, where a model's layers differ by their index."""
        return None

    @property
    def context_length(self) -> int | None:
        """Most positions the model can take; None if nothing in it sets a limit."""
        return None

    def new_cache(self, batch: int = 1, length: int = 0) -> KVCache:
        """An empty cache with room for ``length`` positions; it grows beyond them."""
        return KVCache(len(self.blocks), batch, length)

    def forward(
        self, ids: Tensor, cache: KVCache | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Logits of the token after each position.

        Args:
            ids: LongTensor [batch, n], n of at least 1.
            cache: continue after the positions it holds, and add these.
            last_only: only the last position's logits, which spares the product with the
                vocabulary for the others.

        Returns:
            [batch, n, vocabulary], or [batch, 1, vocabulary] with ``last_only``.

        Raises:
            ValueError: ids of another shape, outside the vocabulary or beyond the positions the
                model has; a cache made for another batch.
        """
        start = 0 if cache is None else cache.length
        self._check(ids, start, cache)
        count = ids.shape[1]
        span = self._span(start, count)
        x = self._embed(ids.to(self.tok_embed.weight.device), start)
        for block in self.blocks:
            x = block(_follow(x, block), span, cache)
        if cache is not None:
            cache.advance(count)
        if last_only:
            x = x[:, -1:]
        x = self.final_ln(_follow(x, self.final_ln))
        logits: Tensor = self.lm_head(_follow(x, self.lm_head))
        return logits

    def _embed(self, ids: Tensor, start: int) -> Tensor:  # noqa: ARG002
        x: Tensor = self.tok_embed(ids)
        return x

    def _span(self, start: int, count: int) -> Span:
        return Span(start, count, self._rotary)

    def _check(self, ids: Tensor, start: int, cache: KVCache | None) -> None:
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids must be [batch, n] with n of at least 1: {tuple(ids.shape)}")
        if cache is not None and cache.batch != ids.shape[0]:
            raise ValueError(f"the cache is for a batch of {cache.batch}, ids are {ids.shape[0]}")
        limit, end = self.context_length, start + ids.shape[1]
        if limit is not None and end > limit:
            raise ValueError(f"{end} positions asked for, but the model has {limit}")
        if ids.numel() and not ids.is_meta:
            # An id out of range would be a bare index error on the CPU and take the whole
            # context down on CUDA.
            low, high = (int(value) for value in torch.aminmax(ids))
            size = self.tok_embed.num_embeddings
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise ValueError(f"token id {wrong} is outside the vocabulary of {size}")


def _follow(x: Tensor, module: nn.Module) -> Tensor:
    parameter = next(module.parameters(), None)
    return x if parameter is None else x.to(parameter.device)
