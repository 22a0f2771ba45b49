"""Checkpoints that several ranks write together, as torch.distributed.checkpoint does it.

``python -m tests.support.distcp_writer OUT``: of each world size a folder below OUT. The ranks are
forks of one process, which imports torch once; they talk by gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORLDS = (1, 2, 4)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on all ranks."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (made * 100).to(dtype)


def sharded(ranks: int) -> dict[str, torch.Tensor]:
    """A tensor of each kind, cut over one mesh or another."""
    line = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (ranks // 2 or 1, 2 if ranks > 1 else 1))
    found: dict[str, torch.Tensor] = {}

    def cut(name: str, whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> None:
        found[name] = distribute_tensor(whole, mesh, placements)

    for at, dtype in enumerate((torch.float32, torch.bfloat16)):
        end = str(dtype).rpartition(".")[2]
        cut(f"rows.{end}", values(at, 12, 6, dtype=dtype), line, Shard(0))
        cut(f"columns.{end}", values(at + 2, 10, 8, dtype=dtype), line, Shard(1))
        cut(f"grid.{end}", values(at + 4, 8, 12, dtype=dtype), grid, Shard(0), Shard(1))
        cut(f"turned_grid.{end}", values(at + 6, 8, 12, dtype=dtype), grid, Shard(1), Shard(0))
        cut(f"rows_twice.{end}", values(at + 8, 9, 5, dtype=dtype), grid, Shard(0), Shard(0))
        cut(f"replicated.{end}", values(at + 10, 5, 3, dtype=dtype), line, Replicate())
        cut(f"half.{end}", values(at + 12, 6, 6, dtype=dtype), grid, Replicate(), Shard(1))
        cut(f"uneven.{end}", values(at + 14, 5, 3, dtype=dtype), line, Shard(0))
        cut(f"uneven_grid.{end}", values(at + 16, 7, 5, dtype=dtype), grid, Shard(0), Shard(1))
        cut(f"experts.{end}", values(at + 18, 4, 6, 8, dtype=dtype), line, Shard(1))
        cut(f"expert_grid.{end}", values(at + 20, 4, 6, 8, dtype=dtype), grid, Shard(0), Shard(2))
        cut(f"bias.{end}", values(at + 22, 7, dtype=dtype), line, Shard(0))
        found[f"plain.{end}"] = values(at + 24, 3, 4, dtype=dtype)
    found["scalar"] = torch.tensor(2.5)
    found["steps"] = torch.arange(5)
    found["turned"] = values(30, 4, 6).t()
    return found


def fsdp(ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module as FSDP2 shards it, and an optimizer that has taken a step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,))
    module = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3, bias=False))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return module, optimizer


class _Application:
    """A state that saves itself, as FSDP's tutorial has it: names lie under ``app.model``."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(*self._parts)
        return {"model": model, "optim": optim}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise NotImplementedError


def _write(folder: str, rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    tensors = sharded(ranks)
    optimizer = {
        "state": {"rows.float32": {"exp_avg": tensors["rows.float32"]}},
        "param_groups": [],
    }
    state = {"model": tensors, "optimizer": optimizer, "step": 3}
    dcp.save(state, checkpoint_id=os.path.join(folder, f"pieces-{ranks}"))
    dcp.save(
        {"app": _Application(*fsdp(ranks))}, checkpoint_id=os.path.join(folder, f"app-{ranks}")
    )
    writer = dcp.HuggingFaceStorageWriter(
        os.path.join(folder, f"hf-{ranks}"), save_distributed=True
    )
    plain = {name: tensor for name, tensor in tensors.items() if name != "turned"}
    dcp.save(plain, storage_writer=writer)
    dist.destroy_process_group()


def main(folder: str) -> int:
    warnings.simplefilter("ignore")
    failed = 0
    for ranks in WORLDS:
        store = os.path.join(tempfile.mkdtemp(dir=folder), "store")
        children = []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                try:
                    torch.set_num_threads(1)
                    _write(folder, rank, ranks, store)
                    os._exit(0)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
