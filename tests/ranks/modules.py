"""Modules on meta as ranks shard them, and what each should then hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import streamload
from streamload.mapping.tables.registry import build_model
from streamload.synthesis import synthesize
from tests.hf.their_dozen import DOZEN


class Bag(nn.Module):
    """Tensors of odd sizes."""

    SHAPES: Mapping[str, tuple[int, ...]] = {
        "rows": (7, 5), "columns": (6, 9), "both": (8, 8), "packed": (12, 3), "whole": (3, 3),
        "flat": (5,), "one": (1, 4), "deep": (4, 6, 5), "strided": (16, 4),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), name != "flat"))
        self.register_buffer("table", torch.empty(5, 2))


def _meta(cls: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    with streamload.empty_weights():
        return cls(*arguments)


def _theirs(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = DOZEN[name]()
        return _meta(lambda: type(model)(model.config))

    return build


def _ours(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from streamload.synthesis.presets import PRESETS

        config = PRESETS[name].config
        return _meta(build_model, config["model_type"], config)

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _ours("gpt2-tiny"),
    "llama": _ours("llama-tiny"),
    "hf-llama": _theirs("llama"),
    "hf-qwen3-moe": _theirs("qwen3_moe"),
    "bag": lambda: _meta(Bag),
}


def write(name: str, folder: Path) -> Path:
    """A checkpoint for a model, float32."""
    torch.manual_seed(5)
    if name.startswith("hf-"):
        DOZEN[name[3:].replace("-", "_")]().save_pretrained(folder)
    elif name == "bag":
        from safetensors.torch import save_file

        shapes = {**Bag.SHAPES, "table": (5, 2)}
        folder.mkdir()
        save_file({n: torch.randn(s) for n, s in shapes.items()}, folder / "model.safetensors")
    else:
        synthesize(f"{name}-tiny", folder, masks=False)
    return folder


# One tensor-parallel plan for all: names end alike in our models and in transformers'.
_COLUMNS = (
    "q",
    "k",
    "v",
    "qkv",
    "up",
    "gate",
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
)
_ROWS = ("out_proj", "down", "o_proj", "down_proj")


def _style(path: str, module: nn.Module) -> Any:
    last = path.rpartition(".")[2]
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if isinstance(module, nn.Linear):
        return (
            ColwiseParallel()
            if last in _COLUMNS or "head" in last
            else (RowwiseParallel() if last in _ROWS else None)
        )
    return SequenceParallel() if last.startswith(("norm", "ln", "input_layernorm")) else None


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(model, Bag):
        _place(model, mesh)
        return
    tied = [names for names in _tied(model) if len(names) > 1]
    styles = {p: s for p, m in model.named_modules() if (s := _style(p, m)) is not None}
    parallelize_module(model, mesh, styles)
    for module in model.modules():  # stacked experts: gate and up are cut one by one
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and tensor.ndim == 3:
                place = _StridedShard(1, split_factor=2) if "gate_up" in name else Shard(2)
                _distribute(module, name, mesh, [place])
    for first, *others in tied:  # each style makes parameters of its own
        for name in others:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._parameters[attribute] = model.get_parameter(first)


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _place(bag: nn.Module, mesh: DeviceMesh) -> None:
    for name, place in {
        "rows": Shard(0), "columns": Shard(1), "both": Shard(-1), "whole": Replicate(),
        "packed": _StridedShard(0, split_factor=2), "flat": Shard(0), "one": Shard(0),
        "deep": Shard(2), "strided": _StridedShard(0, split_factor=4), "table": Shard(0),
    }.items():  # fmt: skip
        _distribute(bag, name, mesh, [place])


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, places: list[Any]) -> None:
    tensor = getattr(module, name)
    if tensor.is_meta:
        made: torch.Tensor = distribute_tensor(tensor, mesh, places, src_data_rank=None)
    else:  # empty_weights leaves buffers real
        made = distribute_tensor(tensor.to("meta"), mesh, places, src_data_rank=None)
    if isinstance(tensor, nn.Parameter):
        module._parameters[name] = nn.Parameter(made, requires_grad=tensor.requires_grad)
    else:
        module._buffers[name] = made


def _fully(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard(model: nn.Module, how: str, world: int) -> nn.Module:
    """Shard a model on meta as ``how`` says: ``"fsdp"``, ``"tp"`` or ``"fsdp+tp"``."""
    if how == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        _fully(model, mesh["dp"])
    elif how == "tp":
        _tensor_parallel(model, init_device_mesh("cpu", (world,)))
    else:
        _fully(model, init_device_mesh("cpu", (world,)))
    return model


def differences(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bit for bit this rank's part of the whole, with what is wrong.

    The judge is torch: it cuts the whole tensor by the same placements.
    """
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        expected, held = whole.get(name), tensor
        if expected is None:
            continue
        if name == "table":  # a buffer that is real keeps its type; distributed, it is on meta
            expected = expected.to(tensor.dtype)
        if isinstance(tensor, DTensor):
            if tensor.shape != expected.shape or tensor.stride() != expected.stride():
                found.append(f"{name}: {tensor.shape} {tensor.stride()}")
            spec = tensor.device_mesh, tensor.placements
            if any(p.is_shard() or isinstance(p, _StridedShard) for p in tensor.placements):
                expected = _part(expected, *spec)
            held = tensor.to_local()
        same = held.shape == expected.shape and held.dtype == expected.dtype
        bits = held.detach().contiguous().flatten().view(torch.uint8) if same else None
        if bits is None or not torch.equal(bits, expected.contiguous().flatten().view(torch.uint8)):
            found.append(f"{name}: {tuple(held.shape)} {held.dtype} is no part of the whole")
    return found


def _part(whole: torch.Tensor, mesh: DeviceMesh, places: Any) -> torch.Tensor:
    return distribute_tensor(whole, mesh, places, src_data_rank=None).to_local()


def reference(name: str, path: Path, dtype: str) -> dict[str, torch.Tensor]:
    """All tensors of a full load."""
    model = MODELS[name]()
    streamload.load_into(model, path, dtype=dtype)
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


__all__ = ["MODELS", "Bag", "differences", "hf", "reference", "shard", "write"]
