"""Which small files beside the weights say how to use the model."""

from __future__ import annotations

from fnmatch import fnmatchcase

# The tokenizer's, the processors', generation's. A pattern stands for names in one folder.
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "*_tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json", "tekken.json", "*.tiktoken"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("*processor_config.json", "chat_template*", "additional_chat_templates/*"),
    "generation_config.json",
)
USUAL_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
)
"""Those to ask a server for that does not tell what it has."""


def is_companion(name: str) -> bool:
    """True for a file, relative to the checkpoint's folder, that comes along with the weights."""
    return any(
        fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
        for pattern in _COMPANIONS
    )
