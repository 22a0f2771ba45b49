"""Hundreds of small loads in one process: nothing is left over from any of them."""

import gc
import os
import sys
import threading

import pytest
import torch
from torch import nn

import streamload
from tests.support.tiny import write

LOADS, WARM = 500, 200


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)


def descriptors():
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def python_calls(work):
    """How many functions of Python ``work`` calls: its time, whatever else the machine does."""
    count = 0

    def seen(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("mode", ["stream", "map"])
@pytest.mark.parametrize("fresh", [True, False], ids=["on meta", "in place"])
def test_the_last_load_is_as_the_first(tmp_path, fresh, mode):
    if mode == "map" and not fresh:
        pytest.skip("what holds data is not mapped")
    expected = Small()
    path = write(tmp_path / "s.safetensors", dict(expected.state_dict()))
    kept = Small()

    def load():
        module = kept
        if fresh:
            with streamload.empty_weights():
                module = Small()
        streamload.load_into(module, path, mode=mode)
        return module

    def loads(count):
        for _ in range(count):
            module = load()
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected.state_dict()[name])

    def held():
        gc.collect()
        return len(gc.get_objects())

    loads(WARM)
    before = threading.active_count(), descriptors()
    objects, calls = held(), python_calls(load)
    loads(LOADS - WARM)
    assert held() - objects < LOADS - WARM  # not even one for each load
    assert (threading.active_count(), descriptors()) == before
    assert python_calls(load) == pytest.approx(calls, rel=0.02)
