"""Text to token ids and back, through the ``tokenizers`` package (extra ``text``).

The package runs in a process of its own, which has so much time and memory as its file gives cause
for: see ``child``.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable, Sequence

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, MissingExtraError
from streamload.generation.child import Child

TOKENIZER_FILE = "tokenizer.json"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3  # a UTF-8 character has at most three bytes before its last one
_CONTEXT_TOKENS = 8  # how a token decodes can depend on those before it (a leading space)
_WINDOW_TOKENS = 64
# Tokenizers of other kinds: SentencePiece's, Mistral's, tiktoken's.
_UNREAD = ("tokenizer.model", "tokenizer.model.v3", "spiece.model", "tekken.json", "qwen.tiktoken")
# The largest published ones have 35 MB; they take about 70 ns and 12 bytes of memory for each byte.
_MAX_BYTES = 200_000_000
_LOAD_S, _LOAD_S_PER_BYTE = 0.4, 200e-9
_BUILT_BYTES, _BUILT_PER_BYTE = 64 << 20, 20
# A text of one character takes microseconds, a long one less than 2 µs for each.
_TEXT_S, _TEXT_S_PER_ITEM = 0.4, 20e-6


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        files: a ``tokenizer.json``, or a vocabulary and its merges.
        path: what messages call it, if not by the (first) file.

    Attributes:
        path: the (first) file it was read from, or what holds it.
        vocab_size: number of tokens, added ones included.

    Raises:
        CheckpointError: the files are no tokenizer, or take more time or memory than files of
            their size should; so do ``encode`` and ``decode`` with a text.
    """

    def __init__(self, files: Sequence[str], path: str | None = None) -> None:
        self.path = files[0] if path is None else path
        size = sum(map(os.path.getsize, files))
        if size > _MAX_BYTES:
            raise CheckpointError(
                f"has {size} bytes, expected at most {_MAX_BYTES}", path=self.path
            )
        self._child = Child("tokenizer_child", self.path)
        what = "a tokenizer" if len(files) == 1 else "a vocabulary with merges"
        self.vocab_size: int = self._child.ask(
            f"not {what}: ",
            do="load",
            files=[os.path.abspath(file) for file in files],
            cpu_s=_LOAD_S + _LOAD_S_PER_BYTE * size,
            built_bytes=_BUILT_BYTES + _BUILT_PER_BYTE * size,
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The text's token ids, with the special tokens the tokenizer itself adds if wanted."""
        # Lone surrogates (from an argument that is not UTF-8) have no encoding.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        cpu_s = _TEXT_S + _TEXT_S_PER_ITEM * len(clean)
        request = {"do": "encode", "what": clean, "add_special": add_special}
        ids: list[int] = self._child.ask("cannot encode a text: ", cpu_s=cpu_s, **request)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens and unknown ids."""
        cpu_s = _TEXT_S + _TEXT_S_PER_ITEM * len(ids)
        text: str = self._child.ask("cannot decode: ", cpu_s=cpu_s, do="decode", what=list(ids))
        return text

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


def made_tokenizer(text: bytes, path: str) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` that is inside of another file.

    Args:
        text: the JSON.
        path: the file that holds it.

    Raises:
        As ``load_tokenizer``.
    """
    require("tokenizers", "a text prompt")
    with tempfile.TemporaryDirectory(prefix="streamload-") as folder:
        name = os.path.join(folder, TOKENIZER_FILE)
        with open(name, "wb") as file:
            file.write(text)
        return Tokenizer([name], path)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder: ``tokenizer.json``, else ``vocab.json`` with ``merges.txt``.

    Raises:
        MissingExtraError: the package ``tokenizers`` is not installed.
        CheckpointNotFoundError: the folder has none of these files.
        CheckpointError: a file is damaged.
    """
    require("tokenizers", "a text prompt")
    folder = os.fspath(folder)
    path, vocab, merges = (
        os.path.join(folder, name) for name in (TOKENIZER_FILE, "vocab.json", "merges.txt")
    )
    if os.path.isfile(path):
        return Tokenizer([path])
    if os.path.isfile(vocab) and os.path.isfile(merges):
        return Tokenizer([vocab, merges])
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


def require(package: str, purpose: str) -> None:
    """Refuse if a package of the extra ``text`` is not installed; it is not imported here."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # forbidden, as tests do
        found = None
    if found is None:
        raise MissingExtraError(package, extra="text", purpose=purpose)
