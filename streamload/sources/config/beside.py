"""The configuration in the files beside a checkpoint: ``config.json``, else ``params.json``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.core.specs import TensorSpec
from streamload.sources.config.meta_params import config_from_params
from streamload.sources.hub import folder_of
from streamload.sources.remote.urls import is_url, join
from streamload.sources.small_files import read_object

ADAPTER_CONFIG = "adapter_config.json"


def config_beside(
    path: str, stored: Mapping[str, TensorSpec]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The configuration of the checkpoint at ``path``, and notices; None if there is none.

    Raises:
        CheckpointError: there is a configuration, and it cannot be used.
    """
    folder = folder_of(path)
    config = _read_if_there(join(folder, "config.json"))
    if config is not None:
        return config, ()
    params_path = join(folder, "params.json")
    params = params_beside(path)
    if params is None or "n_layers" not in params:
        return None, ()  # a params.json that is not for these files
    try:
        return config_from_params(params, stored)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(str(error), path=params_path) from error


def params_beside(path: str) -> dict[str, Any] | None:
    """``params.json`` beside the checkpoint at ``path``, as it stands.

    Raises:
        CheckpointError: it is no JSON object.
    """
    return _read_if_there(join(folder_of(path), "params.json"))


def adapter_beside(path: str) -> dict[str, Any] | None:
    """``adapter_config.json`` beside the checkpoint at ``path``; {} if it cannot be read."""
    beside = join(folder_of(path), ADAPTER_CONFIG)
    if not is_url(beside) and not os.path.isfile(beside):
        return None
    try:
        return _read_if_there(beside)
    except (CheckpointError, OSError):
        return {}


def _read_if_there(path: str) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except CheckpointNotFoundError:
        return None
