"""Tiny random transformers models, and their weights copied by hand into ours."""

import os
from itertools import pairwise

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.pytorch_utils import Conv1D

from streamload.generation.sampling import generate
from streamload.mapping.tables.registry import build_model
from tests.families.architectures import ARCHITECTURES


def build_pair(config):
    """(transformers' model, ours): same configuration, same random weights, eval mode."""
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():  # biases and norms start as zeros and ones
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = build_model(config.model_type, config.to_dict()).eval()
    with torch.no_grad():
        copy(peer, ours, ARCHITECTURES[config.model_type].names)
    return peer, ours


def copy(peer, ours, names):
    filled = set()
    for theirs, mine in names.items():
        for layer in range(len(ours.blocks)) if "{}" in mine else [0]:
            sources = [peer.get_submodule(name.format(layer)) for name in theirs.split("+")]
            filled |= fill(ours.get_submodule(mine.format(layer)), sources)
    if not peer.config.tie_word_embeddings:
        filled |= fill(ours.lm_head, [peer.lm_head])
    assert filled == set(ours.parameters())


def fill(module, sources):
    """Weight and bias of ``module``, or what it calls so; returns what was filled."""
    weight = getattr(module, "scale", None)
    weight = module.weight if weight is None else weight
    bias = (
        getattr(module, "shift", None)
        if hasattr(module, "scale")
        else getattr(module, "bias", None)
    )
    weights = [s.weight.t() if isinstance(s, Conv1D) else s.weight for s in sources]
    biases = [s.bias for s in sources if getattr(s, "bias", None) is not None]
    assert weight.shape == torch.cat(weights).shape
    weight.copy_(torch.cat(weights))
    if not biases:
        assert bias is None
        return {weight}
    bias.copy_(torch.cat(biases))
    return {weight, bias}


def check_agrees(peer, ours, *, prompt_length=11, new_tokens=20):
    """Logits within 1e-4, the greedy continuation equal, cached steps as the whole at once."""
    size = ours.tok_embed.num_embeddings
    ids = torch.randint(0, size, (2, prompt_length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = peer(ids).logits
        whole = ours(ids)
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        check_cached_steps(ours, ids, whole)
        greedy = list(generate(ours, ids[:1], max_new_tokens=new_tokens))
        text = ids[:1]
        for token in greedy:
            best = peer(text).logits[0, -1].argmax()
            assert int(best) == token
            text = torch.cat((text, best.view(1, 1)), dim=1)
    assert len(greedy) == new_tokens


def check_cached_steps(ours, ids, whole):
    cache = ours.new_cache(ids.shape[0], 3)  # too small on purpose: it has to grow
    cuts = [0, 1, 2, 6, 7, ids.shape[1]]
    steps = [ours(ids[:, a:b], cache) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=0)
    assert cache.length == ids.shape[1]
    last = ours(ids, last_only=True)
    assert last.shape == (ids.shape[0], 1, whole.shape[2])
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-5, rtol=0)


def check_config_round_trip(config, ours):
    """Our ``to_dict`` read by transformers gives the same model again."""
    written = ours.config.to_dict()
    kind = written.pop("model_type")
    again = transformers.AutoConfig.for_model(kind, **written)
    assert type(again) is type(config)
    rebuilt = build_model(kind, again.to_dict())
    assert rebuilt.config == ours.config
