"""The process in which the ``tokenizers`` package runs.

A tokenizer's file is anybody's: a regular expression in it can take for ever, a table of it any
amount of memory, and an error inside the package can end the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.generation.child import allow_memory, answering


def serve() -> None:
    """Load a tokenizer, then encode and decode."""
    import tokenizers

    backend: Any = None

    def answer(request: Mapping[str, Any]) -> object:
        nonlocal backend
        if request["do"] == "load":
            allow_memory(request["built_bytes"])
            backend = _loaded(tokenizers, request["files"])
            return backend.get_vocab_size(with_added_tokens=True)
        if request["do"] == "encode":
            encoded = backend.encode(request["what"], add_special_tokens=request["add_special"])
            return list(map(int, encoded.ids))
        return str(backend.decode(request["what"], skip_special_tokens=True))

    answering(answer)


def _loaded(tokenizers: Any, files: list[str]) -> Any:
    """One file is a ``tokenizer.json``, two are a vocabulary and its merges."""
    if len(files) == 1:
        with open(files[0], "rb") as file:
            return tokenizers.Tokenizer.from_buffer(file.read())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    if backend.token_to_id(end) is not None:
        backend.add_special_tokens([end])
    return backend
