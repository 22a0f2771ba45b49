"""Small files beside the weights: ``config.json`` with the new dtype, and the tokenizer's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from streamload.planning.records import Plan
from streamload.sources.files import OpenFile

# Files beside the weights that say how to use the model: the tokenizer's and generation's.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "20B_tokenizer.json",
)
_MAX_BYTES = 64 << 20


def config_text(config: Mapping[str, Any], plan: Plan) -> bytes:
    """``config.json`` for a plan's tensors; ``dtype`` is theirs, if floats all have one."""
    config = dict(config)
    floats = {entry.dtype for entry in plan.ledger if "float" in entry.dtype}
    # What a quantised model computes in does not show in what is stored.
    if len(floats) == 1 and "quantization_config" not in config:
        config.pop("torch_dtype", None)
        config["dtype"] = floats.pop()
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    # A surrogate that stands alone becomes JSON's own escape for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def tokenizer_files(folder: str, target: str) -> dict[str, bytes]:
    """The tokenizer's and generation's files in ``folder``, as far as they are not in ``target``
    as the very same files.

    Raises:
        CheckpointError, ReadError: one of them cannot be read.
    """
    found: dict[str, bytes] = {}
    for name in COMPANIONS:
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) > _MAX_BYTES:
            continue
        there = os.path.join(target, name)
        if os.path.exists(there) and os.path.samefile(path, there):
            continue
        with OpenFile(path) as file:
            found[name] = file.read(0, file.size_bytes)
    return found
