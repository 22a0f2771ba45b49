"""Loads beside each other and after each other: right values, and nothing that grows or stays."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

import streamload
from tests.faults.sources import KINDS, TENSORS, same
from tests.reliability import record
from tests.support.tiny import bag_of, open_descriptors, write

ROUNDS = 20
LOADS = 300


def global_state():
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        fresh[0],
        torch.is_grad_enabled(),
        torch.nn.Module.register_parameter,
        torch.nn.Module.register_buffer,
        type(torch.nn.Linear(1, 1).weight),
        torch.nn.Linear(1, 1).weight.device,
    )


@pytest.fixture(autouse=True)
def _state_stays():
    before = global_state(), open_descriptors(), threading.active_count()
    yield
    assert (global_state(), open_descriptors(), threading.active_count()) == before


def in_threads(*tasks):
    """Run all at once; raise what one of them raised."""
    errors = []
    barrier = threading.Barrier(len(tasks))

    def run(task):
        try:
            barrier.wait()
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_two_dtypes_in_two_threads(tmp_path, kind):
    path = KINDS[kind](str(tmp_path))

    def load(dtype):
        for _ in range(ROUNDS):
            module = bag_of(TENSORS)
            streamload.load_into(module, path, dtype=dtype, chunk_bytes=1024, workers=2)
            for name, tensor in TENSORS.items():
                held = module.get_parameter(name)
                assert held.dtype == dtype
                assert torch.equal(held.detach(), tensor.to(dtype))

    errors = in_threads(lambda: load(torch.float16), lambda: load(torch.float32))
    assert not errors, errors
    record("loads beside each other", 2 * ROUNDS)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_one_module_from_two_threads(tmp_path, device):
    """An error, or one complete result: never parts of two."""
    one = KINDS["safetensors"](str(tmp_path))
    for _ in range(ROUNDS):
        module = bag_of(TENSORS, device=device)
        errors = in_threads(
            lambda m=module: streamload.load_into(m, one, chunk_bytes=1024),
            lambda m=module: streamload.load_into(m, one, chunk_bytes=1024),
        )
        assert all(isinstance(error, streamload.StreamloadError) for error in errors)
        assert same(dict(module.named_parameters()))
    record("loads beside each other", 2 * ROUNDS)


def test_two_files_into_one_meta_module(tmp_path):
    """Each commit is whole: the parameters are those of one file or of the other."""
    paths = [
        write(tmp_path / f"{n}.safetensors", {k: torch.full_like(t, n) for k, t in TENSORS.items()})
        for n in (1.0, 2.0)
    ]
    for _ in range(ROUNDS):
        module = bag_of(TENSORS)
        errors = in_threads(
            *(lambda m=module, p=p: streamload.load_into(m, p, chunk_bytes=1024) for p in paths)
        )
        assert all(isinstance(error, streamload.StreamloadError) for error in errors)
        values = {float(p.detach().flatten()[0]) for p in module.parameters()}
        assert len(values) == 1, values


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_forked_child(tmp_path, kind):
    path = KINDS[kind](str(tmp_path))
    assert same(streamload.load_state_dict(path))  # workers and locks have been used before
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                found = streamload.load_state_dict(path, chunk_bytes=1024, workers=2)
                code = 0 if same(found) else 2
            finally:
                os._exit(code)
        children.append(child)
        assert same(streamload.load_state_dict(path, chunk_bytes=1024, workers=2))
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def held():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        mappings = sum(1 for _ in file)
    return resident, mappings, open_descriptors(), threading.active_count()


@pytest.mark.parametrize("mode", ["stream", "map"])
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_300_loads_in_a_row(tmp_path, mode):
    path = KINDS["safetensors"](str(tmp_path))
    dtype = "bfloat16" if mode == "stream" else None

    def load(count):
        for _ in range(count):
            module = bag_of(TENSORS)
            streamload.load_into(module, path, mode=mode, dtype=dtype, chunk_bytes=4096, workers=2)
        assert all(bool(p.any()) for p in module.parameters())

    load(30)
    before = held()
    load(LOADS)
    after = held()
    assert after[0] - before[0] < 4 << 20, f"{after[0] - before[0]} bytes more"
    assert after[1] - before[1] < 16, "mappings"
    assert after[2:] == before[2:]
    record("loads in a row", LOADS)


@pytest.mark.parametrize("kind", ["torch zip", "torch legacy", "sharded"])
def test_failed_loads_in_a_row(tmp_path, kind):
    path = KINDS[kind](str(tmp_path))
    module = bag_of(TENSORS | {"absent": torch.zeros(3)})
    for _ in range(5):
        with pytest.raises(streamload.PlanError):
            streamload.load_into(module, path)
    before = held()
    for _ in range(100):
        with pytest.raises(streamload.PlanError):
            streamload.load_into(module, path)
    after = held()
    assert after[0] - before[0] < 4 << 20
    assert after[2:] == before[2:]
