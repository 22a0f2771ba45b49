"""A GGUF file's tokenizer as the files beside a published checkpoint: pure text, no package.

Source of the conventions: llama.cpp's ``llama-vocab.cpp`` for what the keys mean, the
``tokenizer.json`` of published models for how that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamload.core.errors import CheckpointError
from streamload.sources.gguf.merges import merges_by_score
from streamload.sources.gguf.metadata import Metadata
from streamload.sources.gguf.splitting import normalizer_of, splitting, takes_whole_words
from streamload.sources.small_files import dumped, loads_strictly

_KEY, _WHOLE = "tokenizer.ggml.", "tokenizer.huggingface.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def has_tokenizer(metadata: Metadata) -> bool:
    """False for a file without one."""
    kind = metadata.text(f"{_KEY}model")
    return metadata.has(_WHOLE) or kind not in (None, "no_vocab", "none")


def tokenizer_json(metadata: Metadata) -> bytes:
    """``tokenizer.json``.

    Raises:
        CheckpointError: the tokenizer is of a kind that is not known, or contradicts itself.
    """
    if (whole := metadata.text(_WHOLE)) is not None:
        try:
            loads_strictly(whole.encode())
        except ValueError as error:
            raise CheckpointError(
                f"{_WHOLE!r} is not valid JSON: {error}", path=metadata.path
            ) from error
        return whole.encode()
    vocabulary, kind = _Vocabulary(metadata), metadata.text(f"{_KEY}model")
    if kind == "gpt2":
        return dumped(_byte_level(vocabulary))
    if kind == "llama":
        return dumped(_sentence_piece(vocabulary))
    raise metadata.fault(f"{_KEY}model", "gpt2 or llama: no other tokenizer is made of its keys")


class _Vocabulary:
    """Tokens, their types and the special ones.

    Raises:
        CheckpointError: there are no tokens, or not as many types.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        tokens = metadata.texts(f"{_KEY}tokens")
        if not tokens:
            raise CheckpointError(f"there are no '{_KEY}tokens'", path=metadata.path)
        self.tokens = list(tokens)
        self.types: Sequence[int | float] = self._each("token_type") or [_NORMAL] * len(tokens)

    def _each(self, key: str) -> Sequence[int | float] | None:
        """An array with a number for each token."""
        found = self.metadata.numbers(_KEY + key)
        if found is not None and len(found) != len(self.tokens):
            raise self.metadata.fault(_KEY + key, f"{len(self.tokens)} numbers, one for each token")
        return found

    def merges(self) -> list[str] | None:
        found = self.metadata.texts(f"{_KEY}merges")
        return None if found is None else list(found)

    def scores(self) -> Sequence[int | float] | None:
        found = self._each("scores")
        if found is not None and any(one != one for one in found):
            raise self.metadata.fault(f"{_KEY}scores", "numbers")
        return found

    def ids(self) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens)}

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is cut up; control tokens say nothing."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": at, "content": token, **flags, "special": kind != _USER_DEFINED}
            for at, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Byte-level BPE, as GPT-2 introduced it."""
    metadata = vocabulary.metadata
    merges = vocabulary.merges()
    if merges is None:
        raise CheckpointError(f"there are no '{_KEY}merges'", path=metadata.path)
    pre = metadata.text(f"{_KEY}pre")
    split = splitting(pre, metadata.architecture)
    if split is None:
        raise metadata.fault(f"{_KEY}pre", "a known way of cutting texts up")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = _bpe(vocabulary.ids(), merges)
    model["ignore_merges"] = takes_whole_words(pre, metadata.architecture)
    return {
        **_frame(vocabulary, adds_bos=takes_whole_words(pre, metadata.architecture)),
        "normalizer": normalizer_of(pre, metadata.architecture),
        "pre_tokenizer": split,
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE: spaces are letters, what no token has is written in bytes."""
    metadata = vocabulary.metadata
    scores, merges = vocabulary.scores(), vocabulary.merges()
    if merges is None:
        if scores is None:
            text = f"there are neither '{_KEY}scores' nor '{_KEY}merges'"
            raise CheckpointError(text, path=metadata.path)
        joined = {
            token: (score, at)
            for at, (token, score, kind) in enumerate(
                zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
            )
            if kind in (_NORMAL, _USER_DEFINED)
        }
        try:
            merges = merges_by_score(joined)
        except ValueError as error:
            raise CheckpointError(f"'{_KEY}tokens': {error}", path=metadata.path) from error
    unknown = metadata.whole(f"{_KEY}unknown_token_id")
    unknown = 0 if unknown is None else unknown
    prefix = metadata.flag(f"{_KEY}add_space_prefix") is not False
    normal = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    model = _bpe(vocabulary.ids(), merges)
    model |= {"unk_token": _token(vocabulary, unknown), "fuse_unk": True}
    model["byte_fallback"] = _BYTE in vocabulary.types
    return {
        **_frame(vocabulary, adds_bos=True),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *normal,
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": model,
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": list(merges),
    }


def _frame(vocabulary: _Vocabulary, *, adds_bos: bool) -> dict[str, Any]:
    """What surrounds the model: added tokens, and those put before and after a text."""
    metadata = vocabulary.metadata
    told = metadata.flag(f"{_KEY}add_bos_token")
    adds_bos = adds_bos if told is None else told
    adds_eos = bool(metadata.flag(f"{_KEY}add_eos_token"))
    roles = (("bos_token_id", adds_bos), ("eos_token_id", adds_eos))
    ids = {key: metadata.whole(_KEY + key) if wanted else None for key, wanted in roles}
    before, after = ids["bos_token_id"], ids["eos_token_id"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": _around(vocabulary, before, after),
    }


def _around(
    vocabulary: _Vocabulary, before: int | None, after: int | None
) -> dict[str, Any] | None:
    if before is None and after is None:
        return None
    specials = {at: _token(vocabulary, at) for at in (before, after) if at is not None}

    def template(*parts: tuple[str, int]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for sequence, kind in parts:
            first = [] if before is None else [_special(specials[before], kind)]
            last = [] if after is None else [_special(specials[after], kind)]
            made += [*first, {"Sequence": {"id": sequence, "type_id": kind}}, *last]
        return made

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": {
            token: {"id": token, "ids": [at], "tokens": [token]} for at, token in specials.items()
        },
    }


def _special(token: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}


def _token(vocabulary: _Vocabulary, at: int) -> str:
    if at >= len(vocabulary.tokens):
        raise CheckpointError(
            f"token {at} has a role, but there are only {len(vocabulary.tokens)} tokens",
            path=vocabulary.metadata.path,
        )
    return vocabulary.tokens[at]


def tokenizer_config(metadata: Metadata) -> bytes:
    """``tokenizer_config.json``."""
    tokens = metadata.texts(f"{_KEY}tokens") or ()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _ROLES.items():
        at = metadata.whole(_KEY + key)
        if at is not None and at < len(tokens):
            config[role] = tokens[at]
    length = metadata.whole(f"{metadata.architecture}.context_length")
    if length:
        config["model_max_length"] = length
    if template := metadata.text("tokenizer.chat_template"):
        config["chat_template"] = template
    return dumped(config)
