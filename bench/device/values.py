"""How right: fresh memory, casts, overflows, and what the CPU makes of the same file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file

import streamload
from bench.device import files
from bench.device.machine import Machine
from bench.device.rows import Row, Rows, Sizes, passed
from streamload.core.dtypes import BY_NAME
from streamload.synthesis import synthesize


def fresh_memory(machine: Machine, sizes: Sizes) -> Rows:
    """Memory that the caller let go, while work that reads it is still queued, is loaded into.

    The sum is taken late, on the caller's stream; a load that does not wait for it writes other
    values into the same memory first.
    """
    count = sizes.part_bytes // 2
    path = files.random_bits(sizes.folder, "fresh", 4, sizes.part_bytes)
    right = 0
    for turn in range(sizes.turns // 10):
        old = torch.full((4 * count,), float(turn % 7), dtype=torch.bfloat16, device=machine.memory)
        machine.synchronize()
        machine.keep_busy(20)
        total = old.float().mean()
        del old
        made = streamload.load_state_dict(path, device=machine.device)
        machine.synchronize()
        right += float(total) == turn % 7
        del made
    turns = sizes.turns // 10
    yield passed(
        "work queued before a load keeps its values", right == turns, f"{right} of {turns}"
    )


def casts(machine: Machine, sizes: Sizes) -> Rows:
    """Every pair of dtypes: the same bits as on the CPU (any NaN is as good as another)."""
    path = files.every_dtype(sizes.folder)
    for name in [None, *files.float_names()]:
        dtype = None if name is None else BY_NAME[name].torch_name
        expected = streamload.load_state_dict(path, dtype=dtype)
        found = streamload.load_state_dict(path, dtype=dtype, device=machine.device)
        wrong = differing(found, expected)
        yield passed(f"all dtypes to {dtype or 'their own'}", not wrong, ", ".join(wrong))


def overflows(machine: Machine, sizes: Sizes) -> Rows:
    """One value too large among many is found every time, with any number of workers."""
    path = os.path.join(sizes.folder, "overflow.safetensors")
    values = {f"w.{i}": torch.randn(256, 128) for i in range(12)}
    values["w.7"][200, 5] = 1e30
    os.makedirs(sizes.folder, exist_ok=True)
    save_file(values, path)
    options: dict[str, Any] = {"dtype": "float16", "device": machine.device}
    refused = 0
    for turn in range(sizes.turns):
        try:
            streamload.load_state_dict(
                path, overflow="refuse", workers=1 + turn % 8, chunk_bytes=1 << 16, **options
            )
        except streamload.StreamloadError as error:
            refused += "'w.7': 1 finite values overflow F16" in str(error)
    found = f"{refused} of {sizes.turns}"
    yield passed("an overflow is found", refused == sizes.turns, found)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(300, 64)
        self.h = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))


def features(machine: Machine, sizes: Sizes) -> Rows:
    """Whole loads with what changes their way, against the CPU's values."""
    folder = os.path.join(sizes.folder, "tiny")
    synthesize("gpt2-tiny", folder, masks=False)
    expected = streamload.load(folder, dtype="bfloat16", mode="stream").model.state_dict()

    def check(what: str, **options: Any) -> Row:
        made = streamload.load(folder, dtype="bfloat16", **options).model
        return passed(what, not differing(made.state_dict(), expected))

    device = machine.device
    yield check("a model, its transposed weights included", device=device)
    yield check("a map of devices", device={"": "cpu", "blocks": device})
    yield check("on_layer", device=device, on_layer=lambda *_: None)
    yield check("first load with the cache", device=device, cache=True)
    yield check("second load with the cache", device=device, cache=True)
    loaded = streamload.load(folder, dtype="bfloat16", device=device).model
    streamload.load_into(loaded, folder)
    yield passed("in place", not differing(loaded.state_dict(), expected))
    pairs = dict(streamload.iter_tensors(folder, device=device))
    stored = dict(streamload.iter_tensors(folder))
    machine.synchronize()
    yield passed("one tensor after the other", not differing(pairs, stored))
    try:
        yield from _int8(machine, sizes)
    except streamload.MissingExtraError as error:
        yield Row("int8", str(error))


def _int8(machine: Machine, sizes: Sizes) -> Rows:
    path = os.path.join(sizes.folder, "linear.safetensors")
    torch.manual_seed(0)
    save_file(_Model().state_dict(), path)
    made = {}
    for device in ("cpu", machine.device):
        with streamload.empty_weights():
            model = _Model()
        streamload.load_into(model, path, device=device, dtype="bfloat16", quantize="int8")
        made[device] = [_values(block).cpu() for block in model.h]
    same = all(torch.equal(a, b) for a, b in zip(*made.values(), strict=True))
    yield passed("int8", same)


def _values(block: torch.nn.Module) -> torch.Tensor:
    weight: Any = block.weight
    made: torch.Tensor = weight.dequantize()
    return made


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that are not bit for bit as expected, NaNs apart."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name, tensor in expected.items() if not _same(found[name].cpu(), tensor)]


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    bits = [
        t.detach().contiguous().view(-1).view(torch.uint8).view(t.numel(), t.element_size())
        for t in (one, two)
    ]
    equal = (bits[0] == bits[1]).all(1)
    if one.is_floating_point():
        equal |= (one.float().isnan() & two.float().isnan()).view(-1)
    return bool(equal.all())
