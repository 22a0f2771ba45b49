"""Files for the checks: large ones of random bits, and small ones of every dtype."""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import TensorSpec
from streamload.saving.file_layout import lay_out

_BLOCK_BYTES = 32 << 20


def random_bits(folder: str, name: str, count: int, nbytes: int) -> str:
    """A file of ``count`` BF16 tensors of ``nbytes`` each; any bits, made once."""
    path = os.path.join(folder, f"{name}.safetensors")
    specs = [TensorSpec(f"part.{i:06}.weight", "BF16", (nbytes // 2,), "") for i in range(count)]
    (layout,) = lay_out(specs, path)
    if os.path.exists(path) and os.path.getsize(path) == layout.nbytes:
        return path
    made = torch.Generator().manual_seed(count)
    block = torch.randint(0, 256, (_BLOCK_BYTES + 8,), dtype=torch.uint8, generator=made).numpy()
    os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(layout.header)
        left, turn = layout.nbytes - len(layout.header), 0
        while left:
            start = turn % 8  # so that no two blocks are alike
            size = min(left, _BLOCK_BYTES)
            file.write(block[start : start + size].data)
            left, turn = left - size, turn + 1
    return path


def float_names() -> list[str]:
    """Floating-point dtypes that torch has, by safetensors name."""
    return [
        name
        for name, dtype in BY_NAME.items()
        if dtype.is_floating and dtype.torch_name and hasattr(torch, dtype.torch_name)
        and getattr(torch, dtype.torch_name).is_floating_point
        and _can_cast(getattr(torch, dtype.torch_name))
    ]  # fmt: skip


def every_dtype(folder: str, rows: int = 64) -> str:
    """A file with a matrix of every dtype: random bits, zeros, infinities, the largest values."""
    tensors = {}
    made = torch.Generator().manual_seed(0)
    for name in float_names():
        dtype = getattr(torch, str(BY_NAME[name].torch_name))
        bits = torch.randint(0, 256, (rows, 16 * dtype.itemsize), dtype=torch.uint8, generator=made)
        values = bits.view(dtype).clone()
        special = torch.tensor([0.0, -0.0, 1.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny])
        values[0, :5] = special.to(dtype)
        tensors[f"float.{name}"] = values
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        bits = torch.randint(0, 256, (rows, 16 * dtype.itemsize), dtype=torch.uint8, generator=made)
        tensors[f"whole.{dtype}"] = bits.view(dtype).clone()
    tensors["bool"] = torch.rand(rows, 16, generator=made) > 0.5
    path = os.path.join(folder, "every-dtype.safetensors")
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, path)
    return path


def _can_cast(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1).to(dtype).float()
    except (RuntimeError, NotImplementedError):
        return False
    return True
