"""A mapped tensor is a tensor like any other: saved, copied and shared by itself."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import multiprocessing, nn

import streamload
from streamload import NameMap, Rule, Split
from tests.support.tiny import bag, bag_of, gpt2_tensors, same_bits, values, write, write_gpt2

# One large tensor beside small ones: what drags the file along is seen by its size.
TENSORS = {"big": values(1, 512, 256), "a": values(2, 4, 6), "b": values(3, 5)}


@pytest.fixture
def module(tmp_path):
    path = write(tmp_path / "x.safetensors", TENSORS)
    module = bag_of(TENSORS)
    report = streamload.load_into(module, path, mode="map")
    assert report.bytes_read == 0
    return module


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(line.endswith(".safetensors\n") for line in maps)


def saved(tensor: object) -> bytes:
    into = io.BytesIO()
    torch.save(tensor, into)
    return into.getvalue()


WAYS = {
    "torch.save": lambda t: torch.load(io.BytesIO(saved(t))),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_is_saved_and_copied_by_itself(module, way, bare, name):
    tensor = module.get_parameter(name)
    again = WAYS[way](tensor.detach() if bare else tensor)
    assert same_bits(again, TENSORS[name])
    assert again.untyped_storage().nbytes() == TENSORS[name].nbytes
    assert tensor.untyped_storage().nbytes() == TENSORS[name].nbytes


def test_a_small_tensor_is_saved_small(module):
    assert len(saved(module.a)) < 4096
    assert len(pickle.dumps(module.b)) < 4096


def test_parts_of_a_stored_tensor_have_ranges_of_their_own(tmp_path):
    path = write(tmp_path / "x.safetensors", {"qkv": values(1, 12, 4)})
    shapes = {"q": (4, 4), "k": (4, 4), "v": (4, 4)}
    module, names = bag(shapes), NameMap([Rule("qkv", ["q", "k", "v"], Split())])
    assert streamload.load_into(module, path, mapping=names, mode="map").bytes_read == 0
    for name, part in zip(shapes, values(1, 12, 4).split(4), strict=True):
        assert same_bits(module.get_parameter(name), part)
        assert module.get_parameter(name).untyped_storage().nbytes() == part.nbytes


def test_a_turned_weight_has_its_own_range(tmp_path):
    model = streamload.load(write_gpt2(tmp_path), mode="map").model
    weight = model.blocks[0].attn.qkv.weight
    assert not weight.is_contiguous()
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert same_bits(copy.deepcopy(weight), gpt2_tensors()["h.0.attn.c_attn.weight"].t())


def test_safetensors_saves_a_mapped_module(module, tmp_path):
    save_model(module, str(tmp_path / "again.safetensors"))
    found = load_file(tmp_path / "again.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(same_bits(found[name], t) for name, t in TENSORS.items())


def test_transformers_saves_a_mapped_module(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    first = transformers.LlamaForCausalLM(config)
    first.save_pretrained(tmp_path / "first")
    with streamload.empty_weights():
        second = transformers.LlamaForCausalLM(config)
    report = streamload.load_into(second, tmp_path / "first", mode="map", mapping=lambda name: name)
    assert report.bytes_read == 0
    second.save_pretrained(tmp_path / "second")
    found = load_file(tmp_path / "second" / "model.safetensors")
    wanted = load_file(tmp_path / "first" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], t) for name, t in wanted.items())


def _tell(module, queue):
    # No arithmetic: torch's thread pool does not survive a fork.
    queue.put({name: _last(t) for name, t in module.named_parameters()})


def _last(tensor):
    return tensor.detach().reshape(-1)[-8:].tolist()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_mapped_module_is_shared_with_a_child(module, method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_tell, args=(module, queue))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert queue.get() == {name: _last(t) for name, t in TENSORS.items()}
    assert all(same_bits(module.get_parameter(name), t) for name, t in TENSORS.items())


def test_the_file_is_mapped_once_and_as_long_as_any_tensor_lives(tmp_path):
    gc.collect()
    before = mappings()
    path = write(tmp_path / "x.safetensors", TENSORS)
    found = streamload.load_state_dict(path, mode="map")
    assert mappings() == before + 1
    last = nn.Parameter(found["b"])
    del found
    gc.collect()
    assert mappings() == before + 1
    assert same_bits(last.detach(), TENSORS["b"])
    del last
    gc.collect()
    assert mappings() == before


def test_nothing_of_the_file_is_touched_by_mapping_it(tmp_path):
    path = write(tmp_path / "x.safetensors", {f"t{i}": torch.ones(1 << 18) for i in range(32)})
    found = streamload.load_state_dict(path, mode="map")
    inside, taken = False, 0
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head = line.partition(" ")[0]
            if "-" in head:
                inside = line.endswith("x.safetensors\n")
            elif inside and head in ("Rss:", "Anonymous:"):
                taken += int(line.split()[1])
    assert len(found) == 32
    assert taken == 0


@pytest.mark.parametrize("second", [slice(0, 64), slice(32, 96), slice(64, 128)])
def test_stored_tensors_that_share_bytes_do_not_become_one_parameter(tmp_path, second):
    whole = values(1, 128, 8)
    tensors = {"a": whole[:64], "b": whole[second]}
    torch.save(tensors, tmp_path / "x.pt")
    module = bag_of(tensors)
    report = streamload.load_into(module, tmp_path / "x.pt", mode="map")
    is_apart = second.start >= 64
    assert report.bytes_mapped == (2 if is_apart else 1) * 64 * 8 * 4
    expected = tensors["b"].clone()
    assert same_bits(module.b.detach(), expected)
    with torch.no_grad():
        module.a.add_(1)
    assert same_bits(module.b.detach(), expected)
