"""DTensors: what of them this rank holds, and the same again around new local values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamload.ranks.shards import Cut, Shard, is_ambiguous, shard_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for PyTorch's distributed tensor; where nobody imported it, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor


def held_part(tensor: torch.Tensor) -> tuple[Shard | None, str]:
    """What this rank holds of a DTensor, or why that cannot be told.

    Nothing is asked of other ranks: mesh, placements and this rank's coordinate say it.
    """
    placed: DTensor = tensor  # type: ignore[assignment]
    mesh, shape = placed.device_mesh, tuple(placed.shape)
    local = tuple(_local(tensor).shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shard(local, ()), ""
    cuts: list[Cut] = []
    for at, placement in enumerate(placed.placements):
        groups = _groups(placement)
        if groups is None:
            return None, f"placement {placement!r} cannot be cut out of a file"
        if groups:
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]
            cuts.append(Cut(dim, mesh.size(at), coordinate[at], groups))
    if is_ambiguous(shape, cuts):
        return None, (
            f"shape {list(shape)} cannot be cut evenly by placements {placed.placements!r}, so "
            "that ranks may hold one thing or another"
        )
    shard = shard_of(shape, tuple(cuts))
    if shard.shape != local:
        return None, (
            f"placements {placed.placements!r} make local shape {list(shard.shape)}, but this rank "
            f"holds {list(local)}"
        )
    return shard, ""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, in the same memory."""
    return _local(tensor).detach()


def is_first_holder(tensor: torch.Tensor, ranks: Collection[int]) -> bool:
    """True on the one rank of those holding the same part of a DTensor that speaks for it.

    Args:
        tensor: the DTensor.
        ranks: all that hold the module, so that others may hold the tensor on a mesh of their own.
    """
    from torch.distributed.tensor import Replicate

    placed: DTensor = tensor  # type: ignore[assignment]
    coordinate = placed.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, placed.placements, strict=True)
    if any(at for at, placement in pairs if type(placement) is Replicate):
        return False
    root = placed.device_mesh._get_root_mesh()
    own = placed.device_mesh.mesh_dim_names or ()
    names, place = root.mesh_dim_names or (), root.get_coordinate()
    if place is None or not own or not set(own) < set(names):
        return True
    for dim, (name, at) in enumerate(zip(names, place, strict=True)):
        peer = (*place[:dim], 0, *place[dim + 1 :])
        if name not in own and at and int(root.mesh[peer]) in ranks:
            return False
    return True


def around(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like ``old`` with other local values, a parameter if it is one.

    The global shape and stride are stated, since those of uneven parts cannot be told from one.
    """
    from torch.distributed.tensor import DTensor

    placed: DTensor = old  # type: ignore[assignment]
    made: torch.Tensor = DTensor.from_local(
        local,
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=placed.shape,
        stride=placed.stride(),
    )
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(made, requires_grad=old.requires_grad)
    own = {k: v for k, v in vars(old).items() if k not in vars(made) and k not in _OWN}
    made.__dict__.update(own)
    return made


def ranks_of(module: nn.Module) -> tuple[int, ...]:
    """The ranks that hold parts of the module's DTensors; none where there are no DTensors."""
    api = sys.modules.get("torch.distributed.tensor")
    if api is None:
        return ()
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if type(t) is api.DTensor}
    ranks: set[int] = set()
    for mesh in meshes.values():
        ranks.update(mesh.mesh.flatten().tolist())
    return tuple(sorted(ranks))


def distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    cut_of: Callable[[str, tuple[int, ...]], tuple[int, int] | None],
) -> None:
    """Make an empty module's parameters DTensors over a mesh of one dimension; ties stay.

    Args:
        module: its parameters on meta; others, and buffers, are left as they are.
        mesh: whose ranks share them.
        cut_of: called with a parameter's name and shape; see ``ranks.layouts.cut_of``.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import Placement, _StridedShard

    made: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, old in owner._parameters.items():
            if old is None or not old.is_meta:
                continue
            if id(old) not in made:
                found = cut_of(f"{path}.{name}" if path else name, tuple(old.shape))
                place: Placement = Replicate()
                if found is not None:
                    dim, groups = found
                    place = Shard(dim) if groups == 1 else _StridedShard(dim, split_factor=groups)
                new = distribute_tensor(old, mesh, [place], src_data_rank=None)
                made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
            owner._parameters[name] = made[id(old)]


# A DTensor's own attributes, which hold the old values.
_OWN: Sequence[str] = ("_local_tensor", "_spec")


def _local(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def _groups(placement: object) -> int | None:
    """Into how many groups a dimension is cut first; 0 if it is not cut, None if it is unknown."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is Replicate:
        return 0
    if type(placement) is Shard:
        return 1
    if type(placement) is _StridedShard:
        return int(placement.split_factor)
    return None
