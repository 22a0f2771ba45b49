"""Overwriting in place is told to autograd, as by torch's own ``load_state_dict``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streamload
from streamload import Mean, NameMap, Rule, Transpose
from tests.support.tiny import values, write

MODIFIED = "modified by an inplace operation"


class Net(nn.Module):
    """A linear layer, a buffer that takes part, and a parameter that the file does not have."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.fc(self.fc(x)) * self.scale


STORED = {"fc.weight": values(1, 4, 4), "fc.bias": values(2, 4), "scale": values(3, 4)}


def versions(module):
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor._version for name, tensor in tensors}


def load(module, path, **options):
    streamload.load_into(module, path, strict=False, **options)


def torchs_own(module, path):
    module.load_state_dict(STORED, strict=False)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (torchs_own, {}),
        (load, {}),
        (load, {"chunk_bytes": 8, "workers": 1}),
        (load, {"overflow": "refuse"}),
    ],
    ids=["torch", "whole", "in chunks", "rehearsed"],
)
@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=["as it is", "cast"])
def test_each_overwritten_tensor_counts_one_version(tmp_path, how, options, own):
    path = write(tmp_path / "x.safetensors", STORED)
    module = Net().to(own)
    before = versions(module)
    how(module, path, **options)
    gained = {name: count - before[name] for name, count in versions(module).items()}
    assert gained == {"fc.weight": 1, "fc.bias": 1, "scale": 1, "other": 0}


@pytest.mark.parametrize("how", [torchs_own, load])
@pytest.mark.parametrize("name", STORED)
def test_backward_over_saved_values_raises(tmp_path, how, name):
    path = write(tmp_path / "x.safetensors", {name: STORED[name]})
    module, x = Net(), torch.ones(2, 4, requires_grad=True)
    saved = {"fc.weight": module, "scale": module, "fc.bias": lambda x: module.fc.bias**2 * x}
    loss = saved[name](x).sum()
    how(module, path)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()
    module(x).sum().backward()


def test_what_the_file_does_not_have_may_go_backward(tmp_path):
    path = write(tmp_path / "x.safetensors", STORED)
    module = Net()
    loss = (module.other**2).sum()
    load(module, path)
    loss.backward()
    assert torch.equal(module.other.grad, 2 * torch.ones(4))


def test_turned_merged_and_averaged_ones(tmp_path):
    made = {"t": values(1, 4, 3), "a": values(2, 5), "b": values(2, 5), "x": values(3, 4)}
    path = write(tmp_path / "x.safetensors", made)
    rules = (
        Rule("t", ("turned",), Transpose()),
        Rule(("a", "b"), ("mean",), Mean()),
        Rule("x", ("plain",)),
    )
    module = nn.Module()
    for name, shape in {"turned": (3, 4), "mean": (5,), "plain": (4,)}.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    before = versions(module)
    streamload.load_into(module, path, mapping=NameMap(rules), chunk_bytes=8)
    assert {n: c - before[n] for n, c in versions(module).items()} == dict.fromkeys(before, 1)


def tied_objects():
    """Two parameters of one memory that count their versions apart."""
    module = nn.Module()
    module.one = nn.Parameter(torch.zeros(4, 4))
    module.two = nn.Parameter(module.one.data)
    return module, lambda: (module.two**2).sum()


def tied_names():
    module = nn.Module()
    module.one = nn.Parameter(torch.zeros(4, 4))
    module.two = module.one
    return module, lambda: (module.two**2).sum()


def a_view():
    """A parameter that is a part of another tensor, which is what the loss has saved."""
    base = torch.zeros(2, 4, 4, requires_grad=True)
    module = nn.Module()
    module.register_buffer("one", base.detach()[1])
    return module, lambda: (base**2).sum()


def a_base():
    module = nn.Module()
    module.one = nn.Parameter(torch.zeros(4, 4))
    return module, lambda: (module.one.view(16)[3:5] ** 2).sum()


@pytest.mark.parametrize("made", [tied_objects, tied_names, a_view, a_base])
def test_ties_and_views(tmp_path, made):
    path = write(tmp_path / "x.safetensors", {"one": values(1, 4, 4)})
    module, loss_of = made()
    loss = loss_of()
    streamload.load_into(module, path)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_a_load_that_fails_midway_counts_what_it_has_overwritten(tmp_path):
    path = write(tmp_path / "x.safetensors", {f"w{i}": values(i, 64) for i in range(9)})
    module = nn.Module()
    for name in (f"w{i}" for i in range(9)):
        module.register_parameter(name, nn.Parameter(torch.zeros(64)))
    before = versions(module)

    def progress(done, total, name):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamload.load_into(module, path, progress=progress, chunk_bytes=256, workers=1)
    changed = {n for n, p in module.named_parameters() if p.detach().any()}
    gained = {n for n, c in versions(module).items() if c - before[n]}
    assert changed
    assert changed <= gained


def test_a_load_that_is_refused_counts_nothing(tmp_path):
    path = write(tmp_path / "x.safetensors", {"fc.weight": values(1, 4, 5)})
    module = Net()
    before = versions(module)
    with pytest.raises(streamload.PlanError):
        load(module, path)
    assert versions(module) == before


def test_tensors_of_inference_mode_are_overwritten_and_count_none(tmp_path):
    path = write(tmp_path / "x.safetensors", STORED)
    with torch.inference_mode():
        module = Net()
    load(module, path)
    with torch.inference_mode():
        assert torch.equal(module.fc.weight, STORED["fc.weight"])
        assert torch.equal(module.scale, STORED["scale"])
