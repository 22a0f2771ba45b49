"""What the reference models share: norms, activations, the key/value cache, attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from streamload.models.config_fields import text
from streamload.models.rotary import RotaryTables, rotate

_TANH_GELU = partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    # One formula under the names that published configurations give it.
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_accurate": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_python_tanh": _TANH_GELU,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation_name(config: Mapping[str, Any], name: str, default: str) -> str:
    """The field as the name of an activation.

    Raises:
        ValueError: there is none of that name here.
    """
    activation = text(config, name, default)
    if activation not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise ValueError(f"activation {activation!r} is not supported; known: {known}")
    return activation


def embedding(count: int, width: int) -> nn.Embedding:
    """A table [count, width], drawn with the standard deviation 0.02 of GPT-2."""
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension, ``scale`` and ``shift`` [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.scale.shape, self.scale, self.shift, self.eps)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, ``scale`` [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, self.eps)


class FeedForward(nn.Module):
    """``fc1``, activation, ``fc2``."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.act = _ACTIVATIONS[activation]
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class GatedFeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class KVCache:
    """Keys and values of the positions a model has already seen, filled in place.

    Each layer's buffers [batch, key/value heads, capacity, head size] are made when its first
    keys arrive, with their type and device, and grow when they are full. For inference only:
    autograd does not follow writes into the cache.

    Attributes:
        length: positions held; the next forward continues there.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``k`` and ``v`` [batch, heads, n, head size] after the positions held.

        Returns views of all the layer's keys and values so far; they belong to the cache and
        change with it. ``length`` moves only by ``advance``, so that a forward that fails
        midway leaves the cache as it was.
        """
        end = self.length + k.shape[2]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self._buffers[layer] = self._allocate(buffers, k, end)
        keys, values = buffers
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, count: int) -> None:
        """Count ``count`` more positions as held, once every layer has them."""
        self.length += count

    @property
    def unfilled_rows(self) -> int:
        """Positions that there is room for and that are not held yet, of the whole batch."""
        return self.batch * max(0, self.capacity - self.length)

    @property
    def row_bytes(self) -> int:
        """What one position takes in all layers; 0 while that is not known."""
        made = [pair for pair in self._buffers if pair is not None]
        per_layer = [2 * keys.shape[1] * keys.shape[3] * keys.element_size() for keys, _ in made]
        return sum(per_layer)

    def _allocate(
        self, buffers: tuple[Tensor, Tensor] | None, like: Tensor, end: int
    ) -> tuple[Tensor, Tensor]:
        batch, heads, _, size = like.shape
        capacity = max(self.capacity, end)
        if buffers is not None:
            capacity = max(2 * buffers[0].shape[2], end)
        keys = like.new_empty((batch, heads, capacity, size))
        values = torch.empty_like(keys)
        if buffers is not None:
            keys[:, :, : self.length] = buffers[0][:, :, : self.length]
            values[:, :, : self.length] = buffers[1][:, :, : self.length]
        return keys, values


class Span:
    """The positions ``start .. start + count`` of one forward, and what depends on them alone.

    Masks and rotary tables are made once per forward and shared by the layers.
    """

    def __init__(self, start: int, count: int, rotary: RotaryTables | None = None) -> None:
        self.start = start
        self.count = count
        self.angles = rotary
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rotary(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [count, rotary size] with the type and device of ``like``."""
        assert self.angles is not None
        key = (like.device, like.dtype)
        if key not in self._tables:
            self._tables[key] = self.angles.slice(
                self.start, self.count, device=like.device, dtype=like.dtype
            )
        return self._tables[key]

    def first_key(self, window: int | None) -> int:
        """The first position that any query of the span may look at."""
        return 0 if window is None else max(0, self.start - window + 1)

    def is_plain_causal(self, window: int | None) -> bool:
        """True if query i sees just the keys 0 .. i, which needs no mask of its own."""
        return self.start == 0 and (window is None or self.count <= window)

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """Boolean mask [count, keys from ``first_key``]: True where a query sees a key."""
        key = (window, device)
        if key not in self._masks:
            end = self.start + self.count
            queries = torch.arange(self.start, end, device=device)[:, None]
            keys = torch.arange(self.first_key(window), end, device=device)[None, :]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[key] = seen
        return self._masks[key]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, span: Span, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention.

    Args:
        q: [batch, heads, n, head size], the queries of ``span``.
        k: [batch, key/value heads, positions up to the span's end, head size].
        v: as ``k``.
        span: the queries' positions.
        scale: factor of the products of queries and keys.
        window: a query sees this many positions, itself included; None: all before it.

    Returns:
        [batch, n, heads * head size].
    """
    batch, heads, count, size = q.shape
    first = span.first_key(window)
    if first:
        k, v = k[:, :, first:], v[:, :, first:]
    kv_heads = k.shape[1]
    if count == 1:
        # One query sees every key that is left. Heads that share keys become its rows: the
        # keys are not copied.
        q = q.reshape(batch, kv_heads, heads // kv_heads, size)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return mixed.reshape(batch, 1, heads * size)
    if kv_heads != heads:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    causal = span.is_plain_causal(window)
    mask = None if causal else span.mask(window, q.device)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return mixed.transpose(1, 2).reshape(batch, count, heads * size)


class Attention(nn.Module):
    """Self-attention; a family makes ``out_proj`` and what queries, keys and values come of."""

    out_proj: nn.Linear

    def __init__(self, layer: int, head_size: int, window: int | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = head_size
        self.scale = head_size**-0.5
        self.window = window

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, heads, n, head size] of ``x`` [batch, n, width]."""
        raise NotImplementedError

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        """[batch, n, width] to [batch, n, width]."""
        q, k, v = self._heads(x)
        if span.angles is not None:
            cos, sin = span.rotary(q)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        mixed = attend(q, k, v, span=span, scale=self.scale, window=self.window)
        out: Tensor = self.out_proj(mixed)
        return out


class PreNormBlock(nn.Module):
    """Attention, then the feed-forward part, each on normalised input and added to its input."""

    def __init__(self, ln1: nn.Module, attn: nn.Module, ln2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln1 = ln1
        self.attn = attn
        self.ln2 = ln2
        self.mlp = mlp

    def forward(self, x: Tensor, span: Span, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.ln1(x), span, cache)
        out: Tensor = x + self.mlp(self.ln2(x))
        return out
