"""The tensors of each model family, under their published names and in their natural order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from streamload.core.specs import Shape
from streamload.synthesis.recipes import Recipe

__all__ = ["gpt2", "llama", "neox"]

_STD = 0.02
# A randomly drawn tied model mostly repeats its input, because blocks of the usual small weights
# add little to the embedding. Small made-up models get blocks that speak up instead.
_LIVELY_BELOW_WIDTH = 512


def gpt2(config: Mapping[str, Any], masks: bool) -> Iterator[Recipe]:
    """GPT-2; linear weights are [in, out], as the published Conv1D layers store them."""
    width, positions = config["n_embd"], config["n_positions"]
    std, residual_std = _stds(width, config["n_layer"])
    yield Recipe("wte.weight", (config["vocab_size"], width))
    yield Recipe("wpe.weight", (positions, width))
    for layer in range(config["n_layer"]):
        h = f"h.{layer}."
        yield from _norm(f"{h}ln_1", width)
        if masks:
            yield Recipe(f"{h}attn.bias", (1, 1, positions, positions), "causal_mask")
        yield from _linear(f"{h}attn.c_attn", (width, 3 * width), 3 * width, std)
        yield from _linear(f"{h}attn.c_proj", (width, width), width, residual_std)
        yield from _norm(f"{h}ln_2", width)
        yield from _linear(f"{h}mlp.c_fc", (width, 4 * width), 4 * width, std)
        yield from _linear(f"{h}mlp.c_proj", (4 * width, width), width, residual_std)
    yield from _norm("ln_f", width)


def llama(config: Mapping[str, Any], masks: bool) -> Iterator[Recipe]:
    """LLaMA, Mistral, Qwen2 and Qwen3; linear weights are [out, in]. There are no masks."""
    del masks
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    kv_width = config.get("num_key_value_heads", heads) * head
    inner = config["intermediate_size"]
    kind = config["model_type"]
    std, residual_std = _stds(width, config["num_hidden_layers"])
    embedding: Shape = (config["vocab_size"], width)
    yield Recipe("model.embed_tokens.weight", embedding)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        yield Recipe(f"{p}input_layernorm.weight", (width,), "norm")
        for name, out in (("q", heads * head), ("k", kv_width), ("v", kv_width)):
            yield Recipe(f"{p}self_attn.{name}_proj.weight", (out, width), "normal", std)
            if kind == "qwen2":
                yield Recipe(f"{p}self_attn.{name}_proj.bias", (out,))
        yield Recipe(f"{p}self_attn.o_proj.weight", (width, heads * head), "normal", residual_std)
        if kind == "qwen3":
            yield Recipe(f"{p}self_attn.q_norm.weight", (head,), "norm")
            yield Recipe(f"{p}self_attn.k_norm.weight", (head,), "norm")
        yield Recipe(f"{p}post_attention_layernorm.weight", (width,), "norm")
        yield Recipe(f"{p}mlp.gate_proj.weight", (inner, width), "normal", std)
        yield Recipe(f"{p}mlp.up_proj.weight", (inner, width), "normal", std)
        yield Recipe(f"{p}mlp.down_proj.weight", (width, inner), "normal", residual_std)
    yield Recipe("model.norm.weight", (width,), "norm")
    if not config["tie_word_embeddings"]:
        yield Recipe("lm_head.weight", embedding)
    elif kind == "qwen3":
        # The published small Qwen3 files hold the tied head a second time.
        yield Recipe("lm_head.weight", embedding, drawn_as="model.embed_tokens.weight")


def neox(config: Mapping[str, Any], masks: bool) -> Iterator[Recipe]:
    """GPT-NeoX and Pythia; QKV rows are [head][q, k, v][head size]."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    positions = config["max_position_embeddings"]
    rotary = int(width // config["num_attention_heads"] * config["rotary_pct"])
    std, residual_std = _stds(width, config["num_hidden_layers"])
    yield Recipe("gpt_neox.embed_in.weight", (config["vocab_size"], width))
    for layer in range(config["num_hidden_layers"]):
        p = f"gpt_neox.layers.{layer}."
        yield from _norm(f"{p}input_layernorm", width)
        yield from _norm(f"{p}post_attention_layernorm", width)
        if masks:
            mask: Shape = (1, 1, positions, positions)
            yield Recipe(f"{p}attention.bias", mask, "causal_mask", dtype="bool")
            yield Recipe(f"{p}attention.masked_bias", (), "constant", -1e9)
            base = float(config["rotary_emb_base"])
            yield Recipe(f"{p}attention.rotary_emb.inv_freq", (rotary // 2,), "inv_freq", base)
        yield from _linear(f"{p}attention.query_key_value", (3 * width, width), 3 * width, std)
        yield from _linear(f"{p}attention.dense", (width, width), width, residual_std)
        yield from _linear(f"{p}mlp.dense_h_to_4h", (inner, width), inner, std)
        yield from _linear(f"{p}mlp.dense_4h_to_h", (width, inner), width, residual_std)
    yield from _norm("gpt_neox.final_layer_norm", width)
    yield Recipe("embed_out.weight", (config["vocab_size"], width))


def _stds(width: int, layers: int) -> tuple[float, float]:
    """Standard deviations of ordinary weights, and of those that write to the residual stream."""
    if width < _LIVELY_BELOW_WIDTH:
        lively = float(width**-0.5)
        return lively, lively
    # GPT-2's own rule: one residual write for attention and one for the MLP of each block.
    return _STD, float(_STD / (2 * layers) ** 0.5)


def _linear(name: str, shape: Shape, out: int, std: float) -> Iterator[Recipe]:
    yield Recipe(f"{name}.weight", shape, "normal", std)
    yield Recipe(f"{name}.bias", (out,))


def _norm(name: str, width: int) -> Iterator[Recipe]:
    yield Recipe(f"{name}.weight", (width,), "norm")
    yield Recipe(f"{name}.bias", (width,))
