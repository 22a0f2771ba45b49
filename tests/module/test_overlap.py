"""Overwriting in place: tensors over one storage are refused where one would harm another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streamload
from streamload.core.errors import PlanError
from tests.support.tiny import refused, same_bits, values, write


def module_of(tensors, buffers=None):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    for name, tensor in (buffers or {}).items():
        module.register_buffer(name, tensor, persistent=False)
    return module


def checkpoint(tmp_path, module):
    made = {n: values(i, *t.shape).to(t.dtype) for i, (n, t) in enumerate(named(module).items())}
    return write(tmp_path / "x.safetensors", made), made


def named(module):
    return dict(module.named_parameters(remove_duplicate=False))


def pair(one, two):
    return module_of({"one": one, "two": two})


def over(*views):
    base = torch.zeros(8, 8)
    return pair(*(view(base) for view in views))


OVERLAPPING = {
    "shifted": lambda: over(lambda b: b.view(-1)[:4], lambda b: b.view(-1)[2:]),
    "one row": lambda: over(lambda b: b[:4], lambda b: b[3:]),
    "turned": lambda: over(lambda b: b, lambda b: b.t()),
    "another shape": lambda: over(lambda b: b, lambda b: b.view(-1)),
    "other bytes": lambda: over(lambda b: b[0], lambda b: b[0].view(torch.int32)),
    "columns": lambda: over(lambda b: b[:, :5], lambda b: b[:, 4:]),
    "a column and a row": lambda: over(lambda b: b[:, 7], lambda b: b[3]),
    "every second and third": lambda: over(lambda b: b.view(-1)[::2], lambda b: b.view(-1)[1::3]),
    "diagonal": lambda: over(lambda b: b.diagonal(), lambda b: b[:1]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("strict", [True, False])
def test_two_that_overlap_are_refused_with_both_names(tmp_path, name, strict):
    module = OVERLAPPING[name]()
    path, _ = checkpoint(tmp_path, module)
    with refused(path, module) as caught:
        streamload.load_into(module, path, strict=strict)
    assert "'one' and 'two' share" in str(caught[0])
    assert not streamload.plan(module, path).ok


DISJOINT = {
    "halves": lambda: over(lambda b: b[:4], lambda b: b[4:]),
    "columns": lambda: over(lambda b: b[:, :4], lambda b: b[:, 4:]),
    "even and odd": lambda: over(lambda b: b.view(-1)[::2], lambda b: b.view(-1)[1::2]),
    "a row and a turned block": lambda: over(lambda b: b[0], lambda b: b[1:, 2:5].t()),
    "none in one": lambda: over(lambda b: b[:0], lambda b: b),
}


@pytest.mark.parametrize("name", DISJOINT)
def test_parts_without_a_common_byte_are_filled(tmp_path, name):
    module = DISJOINT[name]()
    path, made = checkpoint(tmp_path, module)
    streamload.load_into(module, path)
    assert all(same_bits(t, made[n]) for n, t in named(module).items())


def test_the_very_same_view_is_a_tie(tmp_path):
    base = torch.zeros(3, 4)
    module = pair(base, base.view(3, 4))
    value = values(1, 3, 4)
    path = write(tmp_path / "x.safetensors", {"one": value})
    streamload.load_into(module, path)
    assert same_bits(module.one, value)
    assert module.two.data_ptr() == module.one.data_ptr()


def test_a_view_that_no_checkpoint_holds_may_overlap(tmp_path):
    base = torch.zeros(3, 4)
    module = module_of({"one": base}, {"turned": base.t()})
    path, made = checkpoint(tmp_path, module)
    streamload.load_into(module, path)
    assert same_bits(module.turned, made["one"].t())


def test_a_parameter_the_file_does_not_hold_is_not_changed_either(tmp_path):
    module = over(lambda b: b[:4], lambda b: b[3:])
    path = write(tmp_path / "x.safetensors", {"one": values(1, 4, 8)})
    with refused(path, module) as caught:
        streamload.load_into(module, path, strict=False)
    assert "'one' and 'two' share" in str(caught[0])


WITHIN = {
    "expanded": lambda: torch.zeros(1, 4).expand(3, 4),
    "one value": lambda: torch.zeros(()).expand(5),
    "windows": lambda: torch.zeros(8).unfold(0, 4, 2),
    "strides that meet": lambda: torch.zeros(30).as_strided((4, 3), (2, 3)),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_target_that_overlaps_itself_is_refused(tmp_path, name):
    module = module_of({"w": WITHIN[name]()})
    path, _ = checkpoint(tmp_path, module)
    with refused(path, module) as caught:
        streamload.load_into(module, path)
    assert "'w' has elements that share memory" in str(caught[0])


def test_odd_strides_without_overlap_are_filled(tmp_path):
    module = module_of({"w": torch.zeros(30).as_strided((2, 3), (3, 2))})
    path, made = checkpoint(tmp_path, module)
    streamload.load_into(module, path)
    assert same_bits(module.w, made["w"])


LAZY = {
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", LAZY)
def test_a_view_with_other_values_than_its_memory_is_refused(tmp_path, name):
    module = module_of({"w": LAZY[name]()})
    path, _ = checkpoint(tmp_path, module)
    with refused(path, module) as caught:
        streamload.load_into(module, path)
    assert f"'w' is a {name} view" in str(caught[0])


def test_a_tensor_and_its_conjugate_are_no_tie(tmp_path):
    base = torch.zeros(3, dtype=torch.complex64)
    module = pair(base, base.conj())
    path, _ = checkpoint(tmp_path, module)
    with pytest.raises(PlanError, match="'two' is a conjugated view"):
        streamload.load_into(module, path)
    streamload.export(module, tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.zeros([1] * 64),
        lambda: torch.zeros(3).as_strided((1, 3), (2**61, 1)),
    ],
    ids=["64 dimensions", "a stride that nothing uses"],
)
def test_dimensions_of_size_one_do_not_matter(tmp_path, view):
    module = module_of({"w": view()})
    path, made = checkpoint(tmp_path, module)
    streamload.load_into(module, path)
    assert same_bits(module.w, made["w"])
