"""A two-layer LLaMA under published names, values exact in 16 bits, and the models for it."""

import json

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import streamload
from streamload.mapping.tables.registry import build_model
from tests.support.tiny import values

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def llama(*, kv_heads=2, size=4, layers=2, has_head=True, has_bias=False):
    """Stored tensors: 4 heads of ``size`` at width 16."""
    tensors = {
        "model.embed_tokens.weight": values(1, 11, 16),
        "model.norm.weight": values(2, 16),
    }
    shapes = {
        "self_attn.q_proj": (4 * size, 16),
        "self_attn.k_proj": (kv_heads * size, 16),
        "self_attn.v_proj": (kv_heads * size, 16),
        "self_attn.o_proj": (16, 4 * size),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
    }
    for layer in range(layers):
        for at, (name, shape) in enumerate(shapes.items()):
            whole = f"model.layers.{layer}.{name}"
            tensors[f"{whole}.weight"] = values(20 * layer + at, *shape)
            if has_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{whole}.bias"] = values(20 * layer + at + 10, shape[0])
    if has_head:
        tensors["lm_head.weight"] = values(3, 11, 16)
    return tensors


def write(folder, tensors, **config):
    """A folder with ``model.safetensors`` and, if asked for, ``config.json``."""
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(**changes):
    """The reference model on meta."""
    config = CONFIG | changes
    with streamload.empty_weights():
        return build_model(config["model_type"], config)


def of_transformers(**changes):
    """transformers' own class on meta; it has the published names."""
    config = LlamaConfig(**{**CONFIG, "bos_token_id": None, "eos_token_id": None, **changes})
    with streamload.empty_weights():
        return LlamaForCausalLM(config).eval()
