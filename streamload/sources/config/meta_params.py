"""``params.json``, the configuration beside Meta's and Mistral's original files, as a config.json.

The rule for the feed-forward size is that of Meta's published LLaMA code: two thirds of four
times the width, times ``ffn_dim_multiplier``, up to the next multiple of ``multiple_of``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streamload.core.specs import TensorSpec

_REFUSED = ("moe", "vision_encoder", "vision_chunk_size", "quantization", "quantization_args")
# LLaMA 3.1's scaling. 3.2's small text models stretch by 32, and their params.json does not say.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SMALL_WIDTH = 3072


def config_from_params(
    params: Mapping[str, Any], stored: Mapping[str, TensorSpec]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a ``config.json`` that ``params`` mean, and notices of what was filled in.

    Args:
        params: the dict in ``params.json``.
        stored: the checkpoint's tensors; the embedding's rows are the vocabulary where
            ``params`` leaves it open (``-1``).

    Raises:
        ValueError: a field is absent or not a whole number, or the model is of another form
            (experts, vision, quantised), or the tensors are those of another.
    """
    other = [name for name in _REFUSED if params.get(name)]
    if other:
        raise ValueError(f"params.json has {', '.join(other)}: there is no model here for that")
    width, heads = _whole(params, "dim"), _whole(params, "n_heads")
    theta = float(params.get("rope_theta") or 10000.0)
    config: dict[str, Any] = {
        # Only Mistral's files say hidden_dim; LLaMA's derive it.
        "model_type": "mistral" if "hidden_dim" in params else "llama",
        "hidden_size": width,
        "num_hidden_layers": _whole(params, "n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": params.get("head_dim") or width // heads,
        "intermediate_size": params.get("hidden_dim") or _feed_forward(params, width),
        "vocab_size": _vocabulary(params, stored),
        "rms_norm_eps": float(params.get("norm_eps") or 1e-5),
        "rope_theta": theta,
        "max_position_embeddings": params.get("max_seq_len") or (8192 if theta > 1e5 else 4096),
        "tie_word_embeddings": False,
    }
    _refuse_contradictions(config, stored)
    if config["model_type"] == "mistral":
        config["sliding_window"] = params.get("sliding_window")
    notices = ["configuration from params.json"]
    if params.get("use_scaled_rope"):
        factor = params.get("rope_scaling_factor")
        if factor is None:
            factor = 32.0 if width <= _SMALL_WIDTH else 8.0
            which = "LLaMA 3.2" if width <= _SMALL_WIDTH else "LLaMA 3.1"
            notices.append(
                f"params.json scales the rotary frequencies but does not say by how much: "
                f"{factor}, as published for {which}"
            )
        config["rope_scaling"] = {**_LLAMA3, "factor": float(factor)}
    return config, tuple(notices)


def _whole(params: Mapping[str, Any], name: str) -> int:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"params.json: {name!r} must be a whole number of at least 1: {value!r}")
    return value


def _vocabulary(params: Mapping[str, Any], stored: Mapping[str, TensorSpec]) -> int:
    if params.get("vocab_size", -1) != -1:
        return _whole(params, "vocab_size")
    embedding = stored.get("tok_embeddings.weight")
    if embedding is None or not embedding.shape:
        raise ValueError("params.json leaves vocab_size open and there is no embedding to count")
    return embedding.shape[0]


def _refuse_contradictions(config: Mapping[str, Any], stored: Mapping[str, TensorSpec]) -> None:
    """Raise ValueError if the tensors are not those of the model that ``params.json`` describes."""
    width, head = config["hidden_size"], config["head_dim"]
    expected = {
        "tok_embeddings.weight": (config["vocab_size"], width),
        "layers.0.attention.wq.weight": (config["num_attention_heads"] * head, width),
        "layers.0.attention.wk.weight": (config["num_key_value_heads"] * head, width),
        "layers.0.feed_forward.w1.weight": (config["intermediate_size"], width),
    }
    wrong = [
        f"{name!r} has shape {list(stored[name].shape)}, but params.json means {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    layers = {int(m[1]) for name in stored if (m := re.match(r"layers\.(\d{1,9})\.", name))}
    count = config["num_hidden_layers"]
    if layers and (len(layers) != count or max(layers) != count - 1):
        wrong.append(f"there are {len(layers)} layers, but params.json means {count}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _feed_forward(params: Mapping[str, Any], width: int) -> int:
    size = int(2 * (4 * width) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        size = int(params["ffn_dim_multiplier"] * size)
    step = int(params.get("multiple_of") or 256)
    return step * -(-size // step)
