"""How a checkpoint wants to be continued: ``generation_config.json``, else ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.sources.hub import folder_of
from streamload.sources.remote.urls import join
from streamload.sources.small_files import loads_strictly, read_object

GENERATION_FILE = "generation_config.json"
# What older checkpoints say of it in config.json, before there was a file of its own.
_IN_CONFIG = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k"),
    *("top_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "num_beams"),
)


def generation_settings(
    path: str, config: Mapping[str, Any], held: bytes | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings for the checkpoint at ``path``, and a notice if its own file is damaged.

    Args:
        path: as the user gave it.
        config: as in ``config.json``; it fills what the other file leaves open.
        held: the file, where the checkpoint has it inside.
    """
    notices: tuple[str, ...] = ()
    own: dict[str, Any] = {}
    try:
        if held is None:
            own = read_object(join(folder_of(path), GENERATION_FILE))
        else:
            own = loads_strictly(held)
    except CheckpointNotFoundError:
        pass
    except CheckpointError as error:
        notices = (f"not used: {error}; config.json says how to generate",)
    own = {key: value for key, value in own.items() if value is not None}
    beside = {key: config[key] for key in _IN_CONFIG if config.get(key) is not None}
    return {**beside, **own}, notices
