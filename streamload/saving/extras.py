"""Small files beside the weights: ``config.json`` with the new dtype, and the tokenizer's."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from streamload.planning.records import Plan
from streamload.sources.config.companions import is_companion
from streamload.sources.files import open_file
from streamload.sources.remote.side_files import read_companions
from streamload.sources.remote.urls import is_url

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


def companions(folder: str, target: str) -> dict[str, bytes]:
    """The companions in ``folder``, as far as they are not in ``target`` as the same files.

    Raises:
        CheckpointError, ReadError: one of them cannot be read.
    """
    if is_url(folder):
        return read_companions(folder)
    found: dict[str, bytes] = {}
    for name in filter(is_companion, _files_below(folder)):
        path, there = os.path.join(folder, name), os.path.join(target, name)
        if os.path.getsize(path) > _MAX_BYTES:
            continue
        if os.path.exists(there) and os.path.samefile(path, there):
            continue
        with open_file(path) as file:
            found[name] = file.read(0, file.size_bytes)
    return found


def left_behind(folder: str, target: str, taken: Collection[str]) -> list[str]:
    """What else is in ``folder``, hidden files and what is in ``target`` as well left out.

    Args:
        folder: of the source.
        target: the new folder.
        taken: names of files that came along, or are the weights.
    """
    whole = {name.partition("/")[0] for name in taken if "/" in name}
    # The new folder may lie in the old one.
    whole.add(os.path.relpath(os.path.realpath(target), os.path.realpath(folder)).split(os.sep)[0])
    return [
        name + ("/" if os.path.isdir(os.path.join(folder, name)) else "")
        for name in sorted(os.listdir(folder))
        if not name.startswith(".") and name not in taken and name not in whole
        if not os.path.exists(os.path.join(target, name))
    ]


def _files_below(folder: str) -> list[str]:
    """The files in a folder and in those directly in it, relative to it, with ``/``."""
    found = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        below = (
            sorted(os.listdir(path)) if os.path.isdir(path) and is_companion(f"{name}/x") else []
        )
        found += [name, *(f"{name}/{inner}" for inner in below)]
    return [name for name in found if os.path.isfile(os.path.join(folder, name))]
