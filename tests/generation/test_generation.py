import pytest
import torch
from torch import nn

from streamload.generation.sampling import generate
from streamload.models.gpt import GPT

TINY = {"vocab_size": 50, "n_positions": 32, "n_layer": 2, "n_embd": 16, "n_head": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = GPT.from_config(TINY)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.eval()


class Counting(nn.Module):
    """Says that the next token is one more than the last; no cache, no parameters."""

    def forward(self, ids):
        self.seen = tuple(ids.shape)
        return nn.functional.one_hot((ids + 1) % 10, 10).float()


class WithoutCache(nn.Module):
    """A reader's module: the same network, called as ``model(ids)`` only."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


def test_greedy_takes_the_best_token_of_the_whole_text(model):
    text = [3, 1, 4]
    tokens = list(generate(model, text, max_new_tokens=8))
    for token in tokens:
        assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text = [*text, token]
    assert len(tokens) == 8
    assert all(type(token) is int for token in tokens)


def test_a_module_without_a_cache_gives_the_same(model):
    ids = torch.tensor([[3, 1, 4]])
    plain = list(generate(WithoutCache(model), ids, max_new_tokens=8))
    assert plain == list(generate(model, ids, max_new_tokens=8))


def test_lists_and_tensors_are_the_same_prompt(model):
    one = list(generate(model, [3, 1], max_new_tokens=3))
    assert one == list(generate(model, torch.tensor([[3, 1]]), max_new_tokens=3))
    assert one == list(generate(model, torch.tensor([[3, 1]], dtype=torch.int32), max_new_tokens=3))


def test_without_a_cache_the_whole_text_is_seen_again():
    counting = Counting()
    assert list(generate(counting, [7], max_new_tokens=4)) == [8, 9, 0, 1]
    assert counting.seen == (1, 4)


def test_logits_may_come_in_an_object():
    class Wrapped(Counting):
        def forward(self, ids):
            return type("Output", (), {"logits": super().forward(ids)})()

    assert list(generate(Wrapped(), [2], max_new_tokens=2)) == [3, 4]


@pytest.mark.parametrize("stop", [9, [9, 30], {9}, torch.tensor(9)])
def test_the_stop_token_ends_and_is_not_yielded(stop):
    assert list(generate(Counting(), [6], max_new_tokens=20, stop_token=stop)) == [7, 8]


def test_a_step_is_computed_only_when_it_is_asked_for():
    counting = Counting()
    steps = generate(counting, [1], max_new_tokens=5)
    assert not hasattr(counting, "seen")
    assert next(steps) == 2
    assert counting.seen == (1, 1)


def test_inference_mode_does_not_reach_the_code_between_steps(model):
    for _ in generate(model, [1], max_new_tokens=2):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model):
    def draw(seed):
        return list(generate(model, [1, 2], max_new_tokens=20, temperature=1.5, seed=seed))

    before = torch.get_rng_state()
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_generator_draws(model):
    def draw():
        torch.manual_seed(3)
        return list(generate(model, [1, 2], max_new_tokens=20, temperature=1.5))

    assert draw() == draw()


class Fixed(nn.Module):
    """The same four chances at every step."""

    def forward(self, ids):
        logits = torch.tensor([0.5, 0.2, 0.25, 0.05]).log()
        return logits.expand(1, ids.shape[1], 4)


def shares(**options):
    draws = 3000
    counts = [0] * 4
    for token in generate(Fixed(), [0], max_new_tokens=draws, seed=0, **options):
        counts[token] += 1
    return [count / draws for count in counts]


def test_draws_follow_the_chances_temperature_and_top_k():
    assert shares(temperature=1.0) == pytest.approx([0.5, 0.2, 0.25, 0.05], abs=0.04)
    assert shares(temperature=1.0, top_k=2) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=0.04)
    squares = [0.25, 0.04, 0.0625, 0.0025]
    expected = [square / sum(squares) for square in squares]
    assert shares(temperature=0.5, top_k=9) == pytest.approx(expected, abs=0.04)
    assert shares(temperature=1e-30) == [1, 0, 0, 0]
    assert shares(temperature=5.0, top_k=1) == [1, 0, 0, 0]


def test_top_p_draws_from_the_fewest_likely_tokens():
    assert shares(temperature=1.0, top_p=0.4) == [1, 0, 0, 0]
    assert shares(temperature=1.0, top_p=1e-300) == [1, 0, 0, 0]
    assert shares(temperature=1.0, top_p=0.6) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=0.04)
    assert shares(temperature=1.0, top_p=1.0) == shares(temperature=1.0)
    # The chances are those among the k most likely: 0.5 / 0.75 of them is enough.
    assert shares(temperature=1.0, top_k=2, top_p=0.6) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": []}, "prompt is empty"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, "prompt is empty"),
        ({"ids": torch.tensor([1, 2])}, r"\[1, n\], not \[2\]"),
        ({"ids": torch.ones(2, 3, dtype=torch.int64)}, r"\[1, n\], not \[2, 3\]"),
        ({"ids": torch.ones(1, 3)}, "whole numbers, not torch.float32"),
        ({"ids": [1.5]}, "whole number"),
        ({"ids": [-1]}, "token id must be .* 0"),
        ({"ids": torch.tensor([[-1]])}, "token id -1 is outside the vocabulary of 50"),
        ({"ids": [50]}, "token id 50 is outside the vocabulary of 50"),
        ({"ids": [2**70]}, "token id must be"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"ids": [1] * 20, "max_new_tokens": 13}, "20 prompt tokens and 13 new .* 32 positions"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_the_call(model, changes, message):
    arguments = {"ids": [1, 2], "max_new_tokens": 3} | changes
    with pytest.raises(ValueError, match=message):
        generate(model, arguments.pop("ids"), **arguments)


def test_the_last_position_can_be_used(model):
    assert len(list(generate(model, [1] * 20, max_new_tokens=12))) == 12


def test_a_readers_position_table_sets_the_limit():
    module = Counting()
    module.pos_embed = nn.Embedding(6, 2)
    assert len(list(generate(module, [1, 2], max_new_tokens=4))) == 4
    with pytest.raises(ValueError, match="6 positions"):
        generate(module, [1, 2], max_new_tokens=5)


def test_no_new_tokens_is_nothing(model):
    assert list(generate(model, [1], max_new_tokens=0)) == []


def test_a_model_without_values_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'weight' has no values"):
        generate(nn.Linear(2, 2, device="meta"), [1], max_new_tokens=1)


@pytest.mark.parametrize(
    ("out", "found"), [(torch.ones(1, 3), r"\[1, 3\]"), (("a", "b"), "tuple")], ids=str
)
def test_what_gives_no_logits_of_tokens_is_refused(out, found):
    class Wrong(nn.Module):
        def forward(self, ids):
            return out

    with pytest.raises(ValueError, match=rf"logits \[1, n, vocabulary\], not {found}"):
        next(generate(Wrong(), [1], max_new_tokens=2))
