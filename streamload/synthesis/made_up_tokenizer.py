"""A made-up tokenizer.json: bytes as GPT-2 numbers them, then nonsense words up to the size."""

from __future__ import annotations

import json
from typing import Any

_SYLLABLES = tuple(c + v for c in "bdfghjklmnprstvwz" for v in "aeiou")


def byte_alphabet() -> list[tuple[int, str]]:
    """(byte, printable character) in GPT-2's order: token i of GPT-2 is the i-th pair.

    Bytes that are printable in Latin-1 stand for themselves and come first; the others get the
    characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    moved = [(byte, chr(0x100 + i)) for i, byte in enumerate(others)]
    return [(byte, chr(byte)) for byte in plain] + moved


def tokenizer_json(vocab_size: int, *, end_token: int | None = None) -> str:
    """The file's text for ``vocab_size`` (at least 256) tokens, for the tokenizers library.

    Any text encodes to the 256 byte tokens, since there are no merges. The tokens above decode
    to pronounceable words, so that what a random model says can be read. ``end_token`` is the
    number of ``<|endoftext|>``.

    Raises:
        ValueError: fewer than 256 tokens.
    """
    if vocab_size < 256:
        raise ValueError(f"a byte-level vocabulary has at least 256 tokens, not {vocab_size}")
    vocab = {character: i for i, (_, character) in enumerate(byte_alphabet())}
    special: list[dict[str, Any]] = []
    for token in range(256, vocab_size):
        if token == end_token:
            vocab["<|endoftext|>"] = token
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            special = [{"id": token, "content": "<|endoftext|>", **flags, "special": True}]
        else:
            vocab["\u0120" + _word(token - 256)] = token  # U+0120 is the space byte's character
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def _word(number: int) -> str:
    """A word of two or more syllables, another one for each number."""
    base = len(_SYLLABLES)
    # A fixed stride, prime to the base, keeps neighbouring numbers from sounding alike.
    word = _SYLLABLES[number * 37 % base]
    number //= base
    while True:
        word += _SYLLABLES[number % base]
        number //= base
        if not number:
            return word
