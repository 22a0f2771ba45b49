"""Classes of transformers generate by the cache that their own forward takes and gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from streamload.generation.sampling import generate
from tests.hf.their_dozen import DOZEN

_TINY: dict[str, Any] = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2}
CACHED: dict[str, Callable[[], nn.Module]] = {
    **{name: DOZEN[name] for name in ("gpt2", "llama", "qwen3_moe", "gemma2")},
    "bamba": lambda: hf.BambaForCausalLM(  # counts positions from 0 in each call
        hf.BambaConfig(
            **_TINY, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1],
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**_TINY, state_size=8)),
}  # fmt: skip
# Their state is none of these caches.
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**_TINY, context_length=64)),
}
PROMPT = [5, 7, 11, 13]
COUNT = 20  # past the sliding window of one of them


def made(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(5)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def read_lengths(model: nn.Module) -> list[int]:
    """How many tokens each call is given, filled as it is called."""
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _module, given: lengths.append(given[0].shape[1]))
    return lengths


def theirs(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CACHED)
def test_each_token_is_read_once_and_they_are_the_librarys_own(name: str) -> None:
    model = made(CACHED[name])
    expected = theirs(model)
    lengths = read_lengths(model)
    assert list(generate(model, PROMPT, max_new_tokens=COUNT)) == expected
    assert lengths == [len(PROMPT)] + [1] * (COUNT - 1)


@pytest.mark.parametrize("name", OTHERS)
def test_without_such_a_cache_the_whole_text_is_read(name: str) -> None:
    model = made(OTHERS[name])
    expected = theirs(model)
    lengths = read_lengths(model)
    assert list(generate(model, PROMPT, max_new_tokens=COUNT)) == expected
    assert lengths == list(range(len(PROMPT), len(PROMPT) + COUNT))


def test_a_class_that_counts_positions_behind_its_padding_is_read_whole() -> None:
    """The library's own generate tells it positions from 0, which is not what it was trained on."""
    config = hf.RobertaConfig(
        **_TINY, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64,
        is_decoder=True, pad_token_id=1, bos_token_id=0,
    )  # fmt: skip
    model = made(lambda: hf.RobertaForCausalLM(config))
    text = torch.tensor([[*PROMPT, config.pad_token_id, 7]])
    prompt = text[0].tolist()
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(text, use_cache=False).logits
            text = torch.cat((text, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    got = list(generate(model, prompt, max_new_tokens=COUNT))
    assert got == text[0, len(prompt) :].tolist()


class Older(nn.Module):
    """Takes and gives its cache by the name of older releases: here the sum of what was read."""

    def forward(
        self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        total = int(ids.sum()) + (past_key_values or 0)
        logits = nn.functional.one_hot(torch.full((1, ids.shape[1]), total % 10), 10).float()
        given = {"logits": logits, "past_key_values": total if use_cache else None}
        return type("Output", (), given)()


class Declining(Older):
    """Has the parameters, but gives no cache back."""

    def forward(
        self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> Any:
        assert past_key_values is None
        return super().forward(ids)


@pytest.mark.parametrize(("model", "second"), [(Older(), 1), (Declining(), 2)])
def test_the_older_name_and_a_class_that_gives_none(model: nn.Module, second: int) -> None:
    lengths = read_lengths(model)
    assert list(generate(model, [7], max_new_tokens=4)) == [7, 4, 8, 6]
    assert lengths[:2] == [1, second]


@pytest.mark.parametrize(
    ("build", "prompt", "message"),
    [
        (CACHED["gpt2"], [1, 10**6], "token id 1000000 is outside the vocabulary of [0-9]+"),
        (lambda: hf.GPT2Model(hf.GPT2Config(**_TINY, num_attention_heads=4)), [1], "no next token"),
        (
            lambda: hf.BertForSequenceClassification(
                hf.BertConfig(**_TINY, num_attention_heads=4, intermediate_size=48)
            ),
            [1],
            "BertForSequenceClassification continues no text",
        ),
    ],
    ids=["token", "base", "classifier"],
)
def test_what_cannot_go_on_is_refused_at_the_call(
    build: Callable[[], nn.Module], prompt: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build(), prompt, max_new_tokens=2)


def test_a_position_that_the_model_lacks_is_an_error_in_a_sentence() -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**_TINY, num_attention_heads=4, n_positions=6))
    steps = generate(model, [1, 2, 3, 4], max_new_tokens=9)
    with pytest.raises(ValueError, match="a position that it does not have"):
        list(steps)
