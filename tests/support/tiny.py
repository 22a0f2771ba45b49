"""Tiny checkpoints and modules, and the rules that hold for every refusal."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload

VOCAB, POSITIONS, WIDTH, HEADS, LAYERS = 13, 8, 4, 2, 2
GPT2_CONFIG = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": LAYERS,
}


def container(header: Any, body: bytes = b"", *, length: int | None = None, pad: int = 8) -> bytes:
    """The bytes of a safetensors file; ``header`` is JSON, its text, or its bytes."""
    text = header if isinstance(header, (bytes, str)) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    raw += b" " * (-len(raw) % pad)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def values(seed: int, *shape: int) -> torch.Tensor:
    """Different in every element, and exact in bfloat16 and float16 too."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) * 37 + seed * 101) % 251 - 125).float().reshape(shape) / 64


def gpt2_tensors(layers: int = LAYERS, *, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """GPT-2 as published: matrices are [in, out]."""
    made = {"wte.weight": values(1, vocab, WIDTH), "wpe.weight": values(2, POSITIONS, WIDTH)}
    shapes = {
        "ln_1.weight": (WIDTH,),
        "ln_1.bias": (WIDTH,),
        "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
        "attn.c_attn.bias": (3 * WIDTH,),
        "attn.c_proj.weight": (WIDTH, WIDTH),
        "attn.c_proj.bias": (WIDTH,),
        "ln_2.weight": (WIDTH,),
        "ln_2.bias": (WIDTH,),
        "mlp.c_fc.weight": (WIDTH, 4 * WIDTH),
        "mlp.c_fc.bias": (4 * WIDTH,),
        "mlp.c_proj.weight": (4 * WIDTH, WIDTH),
        "mlp.c_proj.bias": (WIDTH,),
    }
    for layer in range(layers):
        for at, (name, shape) in enumerate(shapes.items()):
            made[f"h.{layer}.{name}"] = values(20 * (layer + 1) + at, *shape)
    return made | {"ln_f.weight": values(3, WIDTH), "ln_f.bias": values(4, WIDTH)}


def with_masks(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Beside the mask buffers that published files hold, four-dimensional and scalar."""
    made = dict(tensors)
    mask = torch.ones(POSITIONS, POSITIONS).tril().to(dtype).view(1, 1, POSITIONS, POSITIONS)
    for layer in range(LAYERS):
        made[f"h.{layer}.attn.bias"] = mask.clone()
        made[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return made


def write(path: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    os.makedirs(os.path.dirname(os.fspath(path)), exist_ok=True)
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, path)
    return os.fspath(path)


def write_gpt2(folder: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> str:
    """A folder as published: config.json and model.safetensors."""
    write(os.path.join(folder, "model.safetensors"), tensors or gpt2_tensors())
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(GPT2_CONFIG, file)
    return os.fspath(folder)


def meta_gpt2(*, vocab: int = VOCAB) -> nn.Module:
    """The reference model without weights."""
    from streamload.mapping.tables.registry import build_model

    with streamload.empty_weights():
        return build_model("gpt2", {**GPT2_CONFIG, "vocab_size": vocab})


def bag(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
    tied: Mapping[str, str] | None = None,
) -> nn.Module:
    """A module with parameters of just these names; ``tied`` is alias → name."""
    root = nn.Module()

    def owner(name: str) -> tuple[nn.Module, str]:
        module = root
        *heads, leaf = name.split(".")
        for head in heads:
            if head not in module._modules:
                module._modules[head] = nn.Module()
            module = module._modules[head]  # type: ignore[assignment]
        return module, leaf

    for name, shape in shapes.items():
        module, leaf = owner(name)
        data = torch.zeros(shape, device=device, dtype=dtype)
        module._parameters[leaf] = nn.Parameter(data, requires_grad=dtype.is_floating_point)
    for alias, name in (tied or {}).items():
        module, leaf = owner(alias)
        module._parameters[leaf] = root.get_parameter(name)
    return root


def bag_of(tensors: Mapping[str, torch.Tensor], **options: Any) -> nn.Module:
    return bag({name: tuple(t.shape) for name, t in tensors.items()}, **options)


class Toy(nn.Module):
    """A tie, a frozen layer, dropout, persistent and other buffers."""

    def __init__(self, vocab: int = 7, width: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.lin = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(width // 2), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)


def toy_tensors() -> dict[str, torch.Tensor]:
    return {
        "emb.weight": values(1, 7, 4),
        "lin.weight": values(2, 4, 4),
        "lin.bias": values(3, 4),
        "frozen.weight": values(4, 4, 4),
        "steps": torch.tensor(123456789),
        "scale": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }


def meta_toy() -> Toy:
    with streamload.empty_weights():
        return Toy()


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    # clone(): a single element may be contiguous with any stride.
    flat = [t.detach().clone(memory_format=torch.contiguous_format) for t in (one, two)]
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in flat))


def holds(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> bool:
    """True if the module's tensors of these names have just these bits."""
    return all(same_bits(module.get_parameter(name), t) for name, t in tensors.items())


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a refused or failed load must leave alone: objects, flags, order."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {
        "tensors": [(name, id(t), t.requires_grad, t.device, t.dtype) for name, t in tensors],
        "held": [t for _, t in tensors],  # keeps the ids from being given to others
        "training": [m.training for m in module.modules()],
        "values": {name: t.detach().clone() for name, t in tensors if not t.is_meta},
    }


def assert_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    now = state_of(module)
    assert now["tensors"] == before["tensors"]
    assert now["training"] == before["training"]
    assert all(same_bits(t, now["values"][name]) for name, t in before["values"].items())


def open_descriptors() -> list[str]:
    """What this process has open, as the links in /proc show it."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone again
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(link for link in found if link.startswith("/") and "/proc/" not in link)


@contextlib.contextmanager
def refused(
    path: Any, module: nn.Module | None = None, kind: type[BaseException] = streamload.PlanError
) -> Iterator[list[BaseException]]:
    """R1 and R2: the error names the path, the module is untouched, no file stays open."""
    before = None if module is None else state_of(module)
    files = open_descriptors()
    caught: list[BaseException] = []
    with pytest.raises(streamload.StreamloadError) as info:
        yield caught
    caught.append(info.value)
    assert isinstance(info.value, kind), repr(info.value)
    assert os.fspath(path) in str(info.value)
    assert "\n" not in str(info.value)
    if module is not None and before is not None:
        assert_unchanged(module, before)
    assert open_descriptors() == files
