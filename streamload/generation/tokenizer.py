"""Text to token ids and back, through the ``tokenizers`` package (extra ``text``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, MissingExtraError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3  # a UTF-8 character has at most three bytes before its last one
_CONTEXT_TOKENS = 8  # how a token decodes can depend on those before it (a leading space)
_WINDOW_TOKENS = 64
# Tokenizers of other kinds: SentencePiece's, Mistral's, tiktoken's.
_UNREAD = ("tokenizer.model", "tokenizer.model.v3", "spiece.model", "tekken.json", "qwen.tiktoken")


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        path: the file it was read from.
        vocab_size: number of tokens, added ones included.
    """

    def __init__(self, backend: Any, path: str) -> None:
        self._backend = backend
        self.path = path
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The text's token ids, with the special tokens the tokenizer itself adds."""
        # Lone surrogates (from an argument that is not UTF-8) have no encoding.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return [int(token) for token in self._backend.encode(clean).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens and unknown ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def stream(self, context: Iterable[int] = ()) -> TextStream:
        """Decode what follows the tokens of ``context``, token by token."""
        return TextStream(self, context)


class TextStream:
    """Incremental decoding: it gives out whole characters only and never takes any back."""

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)[-_CONTEXT_TOKENS:]
        self._given = len(tokenizer.decode(self._ids))

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain, maybe none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # Bytes that do not make up a character yet decode to replacement characters at the end.
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HELD)
        certain = text[self._given : len(text) - held]
        self._given = max(self._given, len(text) - held)
        if not held and len(self._ids) > _WINDOW_TOKENS:
            self._ids = self._ids[-_CONTEXT_TOKENS:]
            self._given = len(self._tokenizer.decode(self._ids))
        return certain

    def finish(self) -> str:
        """End the stream; returns what was still held back."""
        text = self._tokenizer.decode(self._ids)
        rest = text[self._given :]
        self._given = len(text)
        return rest


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder: ``tokenizer.json``, else ``vocab.json`` with ``merges.txt``.

    Raises:
        MissingExtraError: the package ``tokenizers`` is not installed.
        CheckpointNotFoundError: the folder has none of these files.
        CheckpointError: a file is damaged.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", extra="text", purpose="a text prompt") from error
    folder = os.fspath(folder)
    path, vocab, merges = (
        os.path.join(folder, name) for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    what = "a tokenizer"
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return Tokenizer(tokenizers.Tokenizer.from_buffer(file.read()), path)
        if os.path.isfile(vocab) and os.path.isfile(merges):
            path, what = vocab, "a vocabulary with merges"
            return Tokenizer(_from_pair(tokenizers, vocab, merges), path)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"not {what}: {error}", path=path) from error
    others = [name for name in _UNREAD if os.path.isfile(os.path.join(folder, name))]
    if others:
        raise CheckpointNotFoundError(
            f"no tokenizer.json in this folder, only {' and '.join(others)}, which is not read "
            "here; transformers makes a tokenizer.json of it: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR); or give token ids (--tokens 1,2,3)",
            path=folder,
        )
    raise CheckpointNotFoundError(
        "no tokenizer in this folder: looked for tokenizer.json, or vocab.json with merges.txt; "
        "without one, give token ids (--tokens 1,2,3)",
        path=folder,
    )


def _from_pair(tokenizers: Any, vocab: str, merges: str) -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    if backend.token_to_id(end) is not None:
        backend.add_special_tokens([end])
    return backend
