"""What the demonstration tries: random against loaded weights, ties, a wrong shape."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamload.cli.failures import one_line
from streamload.core.errors import MissingExtraError, PlanError, StreamloadError
from streamload.core.report import LoadReport
from streamload.system.peaks import PeakSampler


@dataclass(frozen=True)
class ByLoadFile:
    """What loading without streamload took, and the model that it made."""

    model: nn.Module
    elapsed_s: float
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"elapsed_s": self.elapsed_s, "peak_rss_bytes": self.peak_bytes}


def by_load_file(folder: str, report: LoadReport) -> ByLoadFile:
    """Load by what one would write by hand: initialise, read, rename, transpose, copy.

    In this process and after streamload's own load, so that memory which that has left is at hand.

    Args:
        folder: the checkpoint.
        report: says which stored tensor is which of the model's.
    """
    from safetensors.torch import load_file

    with PeakSampler() as memory:
        start_s = time.perf_counter()
        model = _initialised(folder)
        stored = load_file(os.path.join(folder, "model.safetensors"))
        state = {}
        for row in report.loaded:
            (source,) = row.sources
            turned = "transpose" in row.transform
            state[row.name] = stored[source].t() if turned else stored[source]
        missing = set(model.load_state_dict(state, strict=False).missing_keys)
        elapsed_s = time.perf_counter() - start_s
    tied = {name for group in report.tied for name in group}
    if missing - tied:
        raise StreamloadError(f"nothing in the file is {min(missing - tied)!r}")
    return ByLoadFile(model, elapsed_s, max(memory.peaks.rss_bytes, 0))


def equal_tensors(one: nn.Module, other: nn.Module) -> int:
    """How many tensors there are, after comparing the bits of each.

    Raises:
        StreamloadError: one differs.
    """
    theirs = dict(other.named_parameters())
    ours = dict(one.named_parameters())
    for name, tensor in ours.items():
        bits = [t.detach().contiguous().view(torch.uint8) for t in (tensor, theirs[name])]
        if tensor.shape != theirs[name].shape or not torch.equal(*bits):
            raise StreamloadError(f"{name!r} does not have the file's values")
    return len(ours)


def _initialised(folder: str) -> nn.Module:
    """The model with the random weights that its layers make."""
    from streamload.mapping.tables.registry import build_model

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(config["model_type"], config).eval()


def continuations(folder: str, loaded: Any, prompt: str, count: int) -> tuple[str, str]:
    """What the model says with random weights, and with the loaded ones, drawn greedily.

    Without the package ``tokenizers`` the texts are token ids.
    """
    import streamload
    from streamload.generation.tokenizer import load_tokenizer

    fresh = _initialised(folder)
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


def refusal(folder: str, model: nn.Module, broken: str) -> str:
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
