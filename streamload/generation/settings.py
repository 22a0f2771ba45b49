"""What a checkpoint's generation settings mean for ``generate``: its end tokens, how to draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.errors import CheckpointError

# As transformers fills in what a file with do_sample leaves open.
_TOP_K = 50
# What else a file may ask for, and the value with which it asks for nothing.
_NOT_FOLLOWED = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
}


def end_tokens(settings: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text; none if the settings name none.

    Raises:
        CheckpointError: ``eos_token_id`` is neither a token id nor a list of them.
    """
    end = settings.get("eos_token_id")
    several = end if isinstance(end, list) else [] if end is None else [end]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in several):
        raise CheckpointError(
            "generation_config.json or config.json: eos_token_id must be a token id or a list of "
            f"them, not {end!r}"
        )
    return several


def sampling_defaults(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options for ``generate``, empty for the most likely token, and what it does not follow."""
    left = [
        f"{key}={settings[key]}"
        for key, neutral in _NOT_FOLLOWED.items()
        if settings.get(key) not in (None, neutral)
    ]
    if not settings.get("do_sample"):
        return {}, left
    found = {
        "temperature": settings.get("temperature", 1.0),
        "top_k": settings.get("top_k", _TOP_K) or None,
        "top_p": settings.get("top_p", 1.0),
    }
    return {key: value for key, value in found.items() if value is not None}, left
