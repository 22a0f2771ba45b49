"""What the command line begins while torch is imported: hints, pages and memory, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

import streamload
from streamload.loading import ahead, budget
from streamload.loading.ahead import ahead_of_load, let_go
from streamload.sources.mapped_file import MappedFile
from streamload.synthesis import synthesize
from streamload.system import mappings, pages
from streamload.system.memory import AvailableMemory
from tests.support.tiny import same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model") / "model"
    synthesize("gpt2-stub", made, layers=2)
    return str(made)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    let_go()
    assert not pages._offered
    assert not mappings._offered


def begin(folder, **options):
    with ahead_of_load(folder, options):
        end_s = time.monotonic() + 10
        while any(t.name == "streamload-ahead" for t in ahead.threading.enumerate()):
            assert time.monotonic() < end_s
            time.sleep(0.001)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"mode": "stream"}, {"mode": "map"}, {"dtype": "float16"}],
    ids=str,
)
def test_the_load_takes_what_was_made(folder, options):
    expected = streamload.load(folder, **options).model.state_dict()
    begin(folder, **options)
    offered = {size: len(made) for size, made in pages._offered.items()}
    is_mapped = bool(mappings._offered)
    assert is_mapped == (options in ({}, {"mode": "map"}))
    assert bool(offered) != is_mapped
    loaded = streamload.load(folder, **options)
    # All of it is taken: sizes and numbers were guessed right.
    assert not any(pages._offered.values())
    assert not mappings._offered
    assert all(same_bits(t, expected[name]) for name, t in loaded.model.state_dict().items())
    memory, made = loaded.report.memory, sum(size * count for size, count in offered.items())
    assert memory.peak_anonymous_bytes >= made  # what was made before the load is the load's own


@pytest.mark.parametrize(
    "options",
    [{"cache": True}, {"quantize": "int8"}, {"layers": [0]}, {"device": "cuda"}, {"dtype": "odd"}],
    ids=str,
)
def test_nothing_is_made_for_other_loads(folder, options):
    begin(folder, **options)
    assert not pages._offered
    assert not mappings._offered


@pytest.mark.parametrize("content", [None, b"", b"\x08\0\0\0\0\0\0\0{", b"\xff" * 64])
def test_a_checkpoint_that_cannot_be_used_is_for_the_load_to_tell(tmp_path, content, capfd):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    begin(str(path))
    assert capfd.readouterr() == ("", "")


def test_nothing_is_made_where_memory_is_short(folder, monkeypatch):
    monkeypatch.setattr(ahead, "available_memory", lambda: AvailableMemory(600 << 20, "cgroup"))
    begin(folder, dtype="bfloat16")
    assert pages._offered
    let_go()
    monkeypatch.setattr(ahead, "available_memory", lambda: AvailableMemory(400 << 20, "cgroup"))
    begin(folder, dtype="bfloat16")
    assert not pages._offered


def test_what_was_made_ahead_does_not_count_as_taken_by_others(folder, monkeypatch):
    needed = streamload.load(folder, dtype="bfloat16").report.memory.needed_bytes
    begin(folder, dtype="bfloat16")
    made = sum(size * len(them) for size, them in pages._offered.items())
    left = AvailableMemory(needed - made, "cgroup")
    monkeypatch.setattr(budget, "available_memory", lambda: left)
    assert streamload.load(folder, dtype="bfloat16").report.ok
    with pytest.raises(streamload.MemoryBudgetError):
        streamload.load(folder, dtype="bfloat16")


def test_a_file_that_is_replaced_meanwhile_is_mapped_anew(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    synthesize("gpt2-stub", folder, layers=1, masks=False)
    synthesize("gpt2-stub", other, layers=1, masks=False, seed=1)
    expected = streamload.load(other).model.state_dict()
    begin(str(folder))
    assert mappings._offered
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    found = streamload.load(folder).model.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in found.items())


def test_the_mapping_outlives_its_withdrawal(folder):
    begin(folder)
    loaded = streamload.load(folder)
    let_go()
    assert torch.isfinite(loaded.model.blocks[1].mlp.fc1.weight).all()
    assert MappedFile.__module__ in sys.modules


def test_it_needs_no_torch(folder):
    code = (
        "import sys; from streamload.loading.ahead import ahead_of_load\n"
        f"with ahead_of_load({folder!r}, {{}}): pass\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
