"""A dozen tiny models of transformers, saved by that library with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

_SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

DOZEN: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=67, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SMALL, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SMALL, **_EXPERTS)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**_SMALL, **_DEEPSEEK})),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_SMALL, sliding_window=16)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_SMALL)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=67, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_source_positions=32, max_target_positions=32,
            num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            image_size=16, patch_size=4,
        )
    ),
}  # fmt: skip


def saved(name: str, folder: Path) -> Path:
    """The model called ``name`` in ``folder``, written by transformers."""
    torch.manual_seed(len(name))
    DOZEN[name]().eval().save_pretrained(folder)
    return folder


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """What the model is called with to give logits."""
    ids = torch.tensor([[5, 7, 11, 13]])
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.ones(1, 3, 16, 16)}
    if model.main_input_name == "input_features":
        return {"input_features": torch.ones(1, 8, 64), "decoder_input_ids": ids}
    return {
        "input_ids": ids,
        **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}),
    }


def differences(one: nn.Module, two: nn.Module, *, grads: bool = True) -> list[str]:
    """Parameters and buffers that are not the same bits of the same dtype, and other ties.

    Both modules' own names count, so that another tie is a name more or less.
    """
    a, b = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (one, two))
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [
        name
        for name in a
        if a[name].dtype != b[name].dtype
        or (grads and a[name].requires_grad != b[name].requires_grad)
        or not torch.equal(a[name], b[name])
    ]
