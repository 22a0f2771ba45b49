"""Small, legal checkpoints of every kind that mutations start from."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePosixPath

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

MIXED = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) - 2.5,
    "b": torch.tensor([1.5, float("inf"), float("nan")], dtype=torch.bfloat16),
    "c": torch.tensor([[7, -1]], dtype=torch.int64),
    "d.mask": torch.tensor([True, False, True]),
    "e": torch.tensor(0.25, dtype=torch.float64),
    "f": torch.empty(0, 4),
    "g": torch.arange(5, dtype=torch.uint8),
}
SHARDS = {
    "one.safetensors": {"a": torch.arange(4.0), "b": torch.tensor([3, 4])},
    "two.safetensors": {"c": torch.full((2, 2), 0.5, dtype=torch.float16)},
}


def safetensors_seeds() -> list[bytes]:
    """Whole files, one without tensors among them."""
    return [
        save(MIXED, metadata={"format": "pt", "note": "x"}),
        save({"w": torch.arange(8, dtype=torch.float16)}),
        save({name: MIXED[name] for name in ("a.weight", "f", "g")}),
        save({}, metadata={"format": "pt"}),
    ]


def index_text() -> str:
    """The index over ``SHARDS``."""
    weight_map = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": 40}, "weight_map": weight_map})


def torch_objects() -> list[object]:
    """What the torch files hold."""
    base = torch.arange(24, dtype=torch.float32)
    flat = {name: MIXED[name] for name in ("a.weight", "b", "c", "e")}
    return [
        flat,
        OrderedDict(flat),
        {
            "state_dict": {"w": torch.nn.Parameter(base[:6].reshape(2, 3)), "v": base[6:8]},
            "epoch": 3,
            "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "lr": 0.1},
        },
        {"model": {"w": base[:6]}, "args": argparse.Namespace(lr=0.1), "at": PurePosixPath("x")},
        {"t": base.reshape(4, 6).t(), "row": base[6:12], "same": base, "half": base[::2].half()},
    ]


def _saved(value: object, *, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def zip_seeds() -> list[bytes]:
    """What ``torch.save`` writes."""
    return [_saved(value, zipped=True) for value in torch_objects()]


def legacy_seeds() -> list[bytes]:
    """What ``torch.save`` wrote before the zip format."""
    return [_saved(value, zipped=False) for value in torch_objects()]


def tensors_of(tree: object, prefix: str = "") -> Mapping[str, torch.Tensor]:
    """Every tensor in nested dictionaries, by dotted path."""
    if isinstance(tree, torch.Tensor):
        return {prefix.removesuffix("."): tree}
    found: dict[str, torch.Tensor] = {}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            found.update(tensors_of(value, f"{prefix}{key}."))
    return found


def distcp_seeds(folder: str) -> list[bytes]:
    """What ``.metadata`` may say of the files that this writes to ``folder``."""
    state = {
        "model": {name: MIXED[name] for name in ("a.weight", "b", "c", "e")},
        "halves": {"one": torch.arange(6.0).reshape(2, 3), "two": torch.arange(3.0).reshape(1, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}},
        "step": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    with open(os.path.join(folder, ".metadata"), "rb") as file:
        metadata = pickle.load(file)
    # Two tensors become the halves of one: pieces, as several ranks write them.
    known, stored = metadata.state_dict_metadata, metadata.storage_data
    whole = known.pop("halves.one")
    del known["halves.two"]
    whole.size = torch.Size((3, 3))
    whole.chunks.append(ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((1, 3))))
    known["model.halves"] = whole
    for name, row in (("one", 0), ("two", 2)):
        index = MetadataIndex("model.halves", torch.Size((row, 0)))
        stored[index] = stored.pop(MetadataIndex(f"halves.{name}", torch.Size((0, 0))))
        del metadata.planner_data[f"halves.{name}"]
    metadata.planner_data["model.halves"] = ("model", "halves")
    return [pickle.dumps(metadata, protocol=protocol) for protocol in (2, 4, 4)]
