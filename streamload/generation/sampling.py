"""Continues a prompt token by token, with any module that gives logits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor, nn

from streamload.core.signatures import answers_unknown
from streamload.generation.reading import Reader, reader_of

Pick: TypeAlias = Callable[[Tensor], Tensor]


@answers_unknown
def generate(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_token: int | Collection[int] | None = None,
) -> Iterator[int]:
    """Continue a prompt; each step of the iterator yields one new token id.

    A model with ``new_cache(batch, length)`` (the reference models) sees each position once, and
    so does one of transformers whose class takes a cache with ``use_cache`` and gives it back. Any
    other module is called as ``model(ids)`` on the whole text so far. All may return the logits
    or an object that has them as ``.logits``. Gradients are off during a step only: the code
    between two steps runs as it was.

    Args:
        model: gives logits [1, n, vocabulary] for a LongTensor [1, n].
        ids: the prompt, a LongTensor [1, n] or a sequence of ints, on any device.
        max_new_tokens: yield at most this many.
        temperature: 0 takes the most likely token, the first of several that tie; above 0 draws.
        top_k: draw from the k most likely tokens only.
        top_p: of these, draw from the fewest most likely tokens whose chances add up to this.
        seed: draw with a generator of its own: the same seed gives the same text, and torch's
            global one is left alone.
        stop_token: stop when this token, or one of these, would come next; it is not yielded.

    Raises:
        ValueError: at the call, before anything is computed: an empty prompt, an id outside the
            vocabulary, a number out of range, more positions than the model has, parameters
            without values (on the meta device), or a class of transformers that continues no
            text, such as one that classifies. In a step: a model that gives anything but logits
            [1, n, vocabulary], or looks up a token or position that it does not have.
    """
    _check_kinds(model, ids)
    device = _device_of(model)
    prompt = _prompt(model, ids).to(device)
    _check_numbers(max_new_tokens, temperature, top_k, top_p, seed)
    total = prompt.shape[1] + max_new_tokens
    limit = _context_length(model)
    if limit is not None and total > limit:
        raise ValueError(
            f"{prompt.shape[1]} prompt tokens and {max_new_tokens} new ones do not fit into the "
            f"model's {limit} positions"
        )
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    pick = partial(
        _pick, temperature=float(temperature), top_k=top_k, top_p=top_p, generator=generator
    )
    return _steps(model, prompt, max_new_tokens, pick, _stops(stop_token))


def _check_kinds(model: Any, ids: Any) -> None:
    """Raise TypeError with what to pass instead, unless it is a module, and ids."""
    if not isinstance(model, nn.Module):
        if isinstance(getattr(model, "model", None), nn.Module):
            raise TypeError("the model is .model of what load returned")
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    # transformers' word on it: a class that classifies has logits, too, but not of tokens.
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and not can_generate():
        raise ValueError(f"{type(model).__name__} continues no text: it scores no next token")
    if isinstance(ids, str):
        raise TypeError("ids must be token ids, not text: encode it with the model's tokenizer")
    if isinstance(ids, Mapping):
        raise TypeError("ids must be token ids: the tokenizer's output has them as ['input_ids']")


def _pick(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token, [1, 1], from logits [vocabulary]."""
    logits = logits.float()
    if temperature == 0.0:
        return logits.argmax().view(1, 1)
    candidates = None
    if top_k is not None and top_k < logits.shape[0]:
        logits, candidates = logits.topk(top_k)
    # Shifted first: a tiny temperature must not turn all the logits into infinities.
    chances = torch.softmax((logits - logits.max()) / temperature, dim=0)
    if top_p is not None and top_p < 1:
        chances, order = chances.sort(descending=True)
        # The most likely token stays in any case; multinomial takes chances of any sum.
        kept = chances.cumsum(0) - chances < top_p
        kept[0] = True  # also where ``top_p`` is 0 in float32
        chances = chances * kept
        candidates = order if candidates is None else candidates[order]
    drawn = torch.multinomial(chances, 1, generator=generator)
    return (drawn if candidates is None else candidates[drawn]).view(1, 1)


def _steps(
    model: nn.Module, prompt: Tensor, count: int, pick: Pick, stops: frozenset[int]
) -> Iterator[int]:
    read = reader_of(model, prompt.shape[1] + count)
    text = prompt
    for _ in range(count):
        text = _next_token(read, text, pick)
        token = int(text)
        if token in stops:
            return
        yield token


# The mode is entered for one step, never across a yield: there it would reach into the caller.
@torch.inference_mode()
def _next_token(read: Reader, text: Tensor, pick: Pick) -> Tensor:
    try:
        out: Any = read(text)
    except IndexError as error:
        raise ValueError(
            f"the model looks up a token or a position that it does not have: {error}"
        ) from error
    logits: Any = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the model must give logits [1, n, vocabulary], not {found}")
    return pick(logits[0, -1]).to(text.device)


def _device_of(model: nn.Module) -> torch.device:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"the model's {name!r} has no values yet (it is on the meta device)")
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _prompt(model: nn.Module, ids: Tensor | Sequence[int]) -> Tensor:
    if isinstance(ids, Tensor):
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise ValueError(f"ids must be [1, n], not {list(ids.shape)}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be whole numbers, not {ids.dtype}")
        prompt = ids.detach().to(torch.int64)
    else:
        numbers = [_whole("a token id", one, least=0) for one in ids]
        prompt = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token id")
    size = _vocabulary(model)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or (size is not None and high >= size):
        wrong = low if low < 0 else high
        within = "" if size is None else f" of {size}"
        raise ValueError(f"token id {wrong} is outside the vocabulary{within}")
    return prompt


def _vocabulary(model: nn.Module) -> int | None:
    """How many tokens the model can look up, where its table of them is known."""
    table = getattr(model, "tok_embed", None)
    if table is None:
        find = getattr(model, "get_input_embeddings", None)  # transformers'
        try:
            table = find() if callable(find) else None
        except NotImplementedError:  # a class that does not say
            return None
    size = getattr(table, "num_embeddings", None)
    return size if isinstance(size, int) else None


def _check_numbers(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    _whole("max_new_tokens", max_new_tokens, least=0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a finite number, 0 or more: {temperature!r}")
    if top_k is not None:
        _whole("top_k", top_k, least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1: {top_p!r}")
    if seed is not None:
        _whole("seed", seed, least=0)


def _whole(name: str, value: object, *, least: int) -> int:
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if least <= number < 2**63:
            return number
    raise ValueError(f"{name} must be a whole number from {least} to 2^63 - 1: {value!r}")


def _context_length(model: nn.Module) -> int | None:
    """How many positions the model has: its own answer, or the size of its position table."""
    length = getattr(model, "context_length", None)
    if length is None:
        length = getattr(getattr(model, "pos_embed", None), "num_embeddings", None)
    return length if isinstance(length, int) else None


def _stops(stop_token: int | Collection[int] | None) -> frozenset[int]:
    if stop_token is None:
        return frozenset()
    several = (stop_token,) if isinstance(stop_token, SupportsIndex) else stop_token
    return frozenset(operator.index(one) for one in several)
