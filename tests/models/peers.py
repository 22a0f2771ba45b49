"""Tiny random transformers models, and their weights copied by hand into ours."""

import os
from itertools import pairwise

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from streamload.generation.sampling import generate
from streamload.models.registry import build_model


def build_pair(config):
    """(transformers' model, ours): same configuration, same random weights, eval mode."""
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():  # biases and norms start as zeros and ones
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = build_model(config.model_type, config.to_dict()).eval()
    copy = {"gpt2": copy_gpt2, "gpt_neox": copy_neox}.get(config.model_type, copy_llama)
    with torch.no_grad():
        copy(peer, ours)
    return peer, ours


def fill(module, *, weight, bias=None):
    target = module.scale if hasattr(module, "scale") else module.weight
    assert target.shape == weight.shape
    target.copy_(weight)
    if bias is None:
        assert getattr(module, "bias", None) is None
        assert getattr(module, "shift", None) is None
    else:
        (module.shift if hasattr(module, "shift") else module.bias).copy_(bias)


def fill_like(module, source):
    fill(module, weight=source.weight, bias=getattr(source, "bias", None))


def copy_head(peer, ours):
    if not peer.config.tie_word_embeddings:
        fill_like(ours.lm_head, peer.lm_head)


def copy_gpt2(peer, ours):
    body = peer.transformer
    fill_like(ours.tok_embed, body.wte)
    fill_like(ours.pos_embed, body.wpe)
    fill_like(ours.final_ln, body.ln_f)
    copy_head(peer, ours)
    for block, theirs in zip(ours.blocks, body.h, strict=True):
        fill_like(block.ln1, theirs.ln_1)
        fill_like(block.ln2, theirs.ln_2)
        for module, source in [
            (block.attn.qkv, theirs.attn.c_attn),
            (block.attn.out_proj, theirs.attn.c_proj),
            (block.mlp.fc1, theirs.mlp.c_fc),
            (block.mlp.fc2, theirs.mlp.c_proj),
        ]:
            fill(module, weight=source.weight.t(), bias=source.bias)


def copy_llama(peer, ours):
    body = peer.model
    fill_like(ours.tok_embed, body.embed_tokens)
    fill_like(ours.final_ln, body.norm)
    copy_head(peer, ours)
    for block, theirs in zip(ours.blocks, body.layers, strict=True):
        attn = theirs.self_attn
        parts = [attn.q_proj, attn.k_proj, attn.v_proj]
        bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts])
        fill(block.attn.qkv, weight=torch.cat([p.weight for p in parts]), bias=bias)
        fill_like(block.attn.out_proj, attn.o_proj)
        if hasattr(attn, "q_norm"):
            fill_like(block.attn.q_norm, attn.q_norm)
            fill_like(block.attn.k_norm, attn.k_norm)
        fill_like(block.ln1, theirs.input_layernorm)
        fill_like(block.ln2, theirs.post_attention_layernorm)
        fill_like(block.mlp.gate, theirs.mlp.gate_proj)
        fill_like(block.mlp.up, theirs.mlp.up_proj)
        fill_like(block.mlp.down, theirs.mlp.down_proj)


def copy_neox(peer, ours):
    body = peer.gpt_neox
    fill_like(ours.tok_embed, body.embed_in)
    fill_like(ours.final_ln, body.final_layer_norm)
    copy_head(peer, ours)
    for block, theirs in zip(ours.blocks, body.layers, strict=True):
        fill_like(block.ln1, theirs.input_layernorm)
        fill_like(block.ln2, theirs.post_attention_layernorm)
        fill_like(block.attn.qkv, theirs.attention.query_key_value)
        fill_like(block.attn.out_proj, theirs.attention.dense)
        fill_like(block.mlp.fc1, theirs.mlp.dense_h_to_4h)
        fill_like(block.mlp.fc2, theirs.mlp.dense_4h_to_h)


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
