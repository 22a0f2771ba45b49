"""How texts are cut up before a byte-level BPE sees them: what ``tokenizer.ggml.pre`` names.

The regular expressions are those of the models' published ``tokenizer.json`` files.
"""

from __future__ import annotations

from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS_AND_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PATHS_AND_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}{_SIGNS_AND_LINES}"
_QWEN2 = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{_SIGNS_AND_LINES}"
_TEKKEN = (
    rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+|{_BEFORE}[{_UPPER}]+[{_LOWER}]*|\p{{N}}{_PATHS_AND_LINES}"
)
_GPT2, _DIGITS = "GPT-2's own", "GPT-2's own, and digits one by one"

_WAYS = {
    **dict.fromkeys(("gpt-2", "default"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    "tekken": _TEKKEN,
}
# What files from before the key mean.
_OF_ARCHITECTURE = {"gpt2": "gpt-2", "llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


def _way(pre: str | None, architecture: str) -> str | None:
    return _WAYS.get(_OF_ARCHITECTURE.get(architecture, "default") if pre is None else pre)


def splitting(pre: str | None, architecture: str) -> dict[str, Any] | None:
    """``pre_tokenizer`` of a ``tokenizer.json``; None if the name is not known."""
    way = _way(pre, architecture)
    if way is None:
        return None
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if way == _GPT2:
        return {**level, "use_regex": True}
    if way == _DIGITS:
        return _both({"type": "Digits", "individual_digits": True}, {**level, "use_regex": True})
    split = {
        "type": "Split",
        "pattern": {"Regex": way},
        "behavior": "Isolated",
        "invert": False,
    }
    return _both(split, {**level, "use_regex": False})


def _both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, second]}


def takes_whole_words(pre: str | None, architecture: str) -> bool:
    """True where a word that is a token is not put together by merges, and a text gets a begin
    token unless the file says otherwise (LLaMA 3, Mistral's Tekken).
    """
    return _way(pre, architecture) in (_LLAMA3, _TEKKEN)


def normalizer_of(pre: str | None, architecture: str) -> dict[str, Any] | None:
    """Qwen's texts are composed first."""
    return {"type": "NFC"} if _way(pre, architecture) == _QWEN2 else None
