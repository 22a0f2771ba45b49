"""What training runs leave of a LLaMA in torch.distributed.checkpoint's folders."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import streamload
from tests.families.test_meta_names import to_meta
from tests.models.peers import check_agrees
from tests.support.tiny import same_bits

NESTS = {
    # FSDP's tutorial, Accelerate and Lightning, torchtitan, which has the names at the top.
    "app": lambda model, state: {"app": {"model": model, "optim": state}},
    "model": lambda model, state: {"model": model, "optimizer_0": state},
    "top": lambda model, state: {**model, "optimizer": state, "train_state": {"step": 3}},
}


def trained(folder, model, nest, config):
    state = {"state": {"x": {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(NESTS[nest](model, state), checkpoint_id=folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("names", ["published", "Meta's"])
@pytest.mark.parametrize("nest", NESTS)
def test_load_and_convert(checkpoints, tmp_path, nest, names):
    saved = checkpoints("plain-llama")
    model = dict(saved.peer.state_dict())
    if names != "published":
        model = to_meta(model, 4, 2)
    folder = trained(tmp_path / "run", model, nest, saved.peer.config.to_dict())
    loaded = streamload.load(folder)
    assert loaded.report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    for name, tensor in loaded.model.state_dict().items():
        assert same_bits(tensor, saved.expected.state_dict()[name]), name
    report = streamload.convert(folder, tmp_path / "new")
    assert report.names == "published"
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(same_bits(tensor, saved.peer.state_dict()[n]) for n, tensor in found.items())


def test_load_transformers(checkpoints, tmp_path):
    saved = checkpoints("plain-llama")
    config = saved.peer.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    folder = trained(tmp_path / "run", dict(saved.peer.state_dict()), "model", config)
    loaded = streamload.load_transformers(folder)
    assert type(loaded.model) is type(saved.peer)
    for name, tensor in loaded.model.state_dict().items():
        assert same_bits(tensor, saved.peer.state_dict()[name]), name
    check_agrees(saved.peer, streamload.load(folder).model)
