"""GGUF's names of tensors in published ones, and what the converters to GGUF have re-laid.

Source of the conventions: llama.cpp's ``convert_hf_to_gguf.py`` and the ``gguf`` package's
``TensorNameMap``. Written there for LLaMA (and Mistral, which shares its names), rows of queries
and keys are interleaved pairs; GPT-2's matrices are ``[out, in]``, published as ``[in, out]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class PublishedName:
    """What a tensor is called in a published checkpoint.

    Attributes:
        name: the name.
        pairs: ``"q"`` or ``"k"`` if its rows are interleaved pairs of that side's heads.
        is_turned: it is published transposed.
    """

    name: str
    pairs: str = ""
    is_turned: bool = False


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of one family, without ``.weight`` and ``.bias``."""

    ends: dict[str, str]
    blocks: dict[str, str]
    block: str
    pairs: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()


_LLAMA_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN = _Names(_LLAMA_ENDS, _LLAMA_BLOCKS, "model.layers.")
_LLAMA = _Names(_LLAMA_ENDS, _LLAMA_BLOCKS, "model.layers.", pairs=("attn_q", "attn_k"))
_GPT2 = _Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "transformer.h.",
    turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
_FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _QWEN, "qwen3": _QWEN, "gpt2": _GPT2}
ARCHITECTURES = tuple(_FAMILIES)


def published_name(architecture: object, name: str) -> PublishedName:
    """A tensor's name in a published checkpoint; its own where the family or the tensor is none
    of ours.
    """
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        return PublishedName(name)
    if match := _BLOCK.fullmatch(name):
        layer, part, end = match.groups()
        found = family.blocks.get(part)
        if found is None or str(int(layer)) != layer:
            return PublishedName(name)
        pairs = part[-1] if part in family.pairs else ""
        is_turned = end == "weight" and part in family.turned
        return PublishedName(f"{family.block}{layer}.{found}.{end}", pairs, is_turned)
    part, _, end = name.rpartition(".")
    found = family.ends.get(part)
    return PublishedName(f"{found}.{end}" if found and end in ("weight", "bias") else name)
