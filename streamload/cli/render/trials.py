"""What the demonstration tries: random against loaded weights, ties, a wrong shape."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from typing import Any

import torch

from streamload.cli.failures import one_line
from streamload.core.errors import MissingExtraError, PlanError, StreamloadError


def continuations(folder: str, loaded: Any, prompt: str, count: int) -> tuple[str, str]:
    """What the model says with random weights, and with the loaded ones, drawn greedily.

    Without the package ``tokenizers`` the texts are token ids.
    """
    import streamload
    from streamload.generation.tokenizer import load_tokenizer
    from streamload.mapping.tables.registry import build_model

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = build_model(config["model_type"], config).eval()
    try:
        tokenizer = load_tokenizer(folder)
    except MissingExtraError:
        tokenizer = None
    ids = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt)
    texts = []
    for model in (fresh, loaded.model):
        tokens = list(streamload.generate(model, ids, max_new_tokens=count))
        texts.append(" ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens))
    return texts[0], texts[1]


def check_ties(loaded: Any) -> tuple[str, ...]:
    """The names of the first tied group, after checking that they are one object.

    Raises:
        StreamloadError: they are not one object, or nothing is tied.
    """
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    for group in loaded.report.tied:
        if len({id(parameters[name]) for name in group}) == 1:
            return tuple(group)
        raise StreamloadError(f"{' and '.join(group)} should be one tensor but are not")
    raise StreamloadError("the model's tied weights are not in the report")


def refusal(folder: str, model: torch.nn.Module, broken: str) -> str:
    """How loading a copy of the checkpoint with one misshapen weight is refused.

    Raises:
        StreamloadError: it is not refused, or the model has changed.
    """
    import streamload

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="streamload-") as copy:
        _write_misshapen(folder, copy, broken)
        try:
            streamload.load_into(model, copy)
        except PlanError as error:
            text = one_line(error).replace(copy, "broken-copy")
        else:
            raise StreamloadError(f"the wrong shape of {broken!r} was not refused")
    if not all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()):
        raise StreamloadError("the refused load changed the model")
    return text


def _write_misshapen(folder: str, target: str, name: str) -> None:
    """Copy the checkpoint of ``folder`` with the last column of one weight cut off."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(os.path.join(folder, "model.safetensors"))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, os.path.join(target, "model.safetensors"), metadata={"format": "pt"})
    shutil.copy(os.path.join(folder, "config.json"), target)
