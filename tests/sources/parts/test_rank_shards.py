"""Safetensors with each rank's own pieces, and sharded consolidated files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamload
from streamload.core.errors import CheckpointError
from streamload.sources.base import Source
from tests.sources.conformance import SourceConformance
from tests.sources.distributed.test_distcp import by_torch
from tests.support.tiny import same_bits, values


def name_of(rank: int) -> str:
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def write(folder: Path, ranks: list[dict[str, tuple[list[int], torch.Tensor]]]) -> Path:
    """What HuggingFaceStorageWriter(save_distributed=True) leaves."""
    folder.mkdir()
    for rank, tensors in enumerate(ranks, start=1):
        offsets = {name: {"saved_offsets": at} for name, (at, _) in tensors.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        parts = {name: tensor.contiguous() for name, (_, tensor) in tensors.items()}
        save_file(parts, folder / name_of(rank), metadata=metadata)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_torchs_writer_leaves(written, tmp_path, ranks):
    wanted = by_torch(written / f"pieces-{ranks}", tmp_path / "judge.pt", "model")
    del wanted["turned"]
    found = streamload.load_state_dict(written / f"hf-{ranks}")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor.contiguous()), name
    report = streamload.convert(written / f"hf-{ranks}", tmp_path / "one.safetensors")
    assert any("how large" in notice for notice in report.notices)
    found = load_file(tmp_path / "one.safetensors")
    assert all(same_bits(found[name], tensor.contiguous()) for name, tensor in wanted.items())


W = values(1, 6, 4)
HALVES = [{"w": ([0, 0], W[:, :3])}, {"w": ([0, 3], W[:, 3:])}]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([HALVES[0], {"w": ([0, 2], W[:, 2:])}], "'w': the pieces [0:6, 0:3] and [0:6, 2:4] overl"),
        ([HALVES[0], {"w": ([0, 4], W[:, 3:])}], "lack 6 of 30"),
        ([HALVES[0], {"w": ([0], W[:, 3:])}], "of it"),
        ([HALVES[0], {"w": ([0, -1], W[:, 3:])}], "begin at [0, -1]"),
        ([HALVES[0], {"w": ([3], W[0])}], "dimensions"),
        ([HALVES[0], {"w": ([0, 3], W[:, 3:].half())}], "F32 and F16"),
    ],
)
def test_pieces_that_make_no_tensor(tmp_path, ranks, words):
    folder = write(tmp_path / "x", ranks)
    with pytest.raises(CheckpointError) as caught:
        streamload.open_checkpoint(folder)
    assert words in str(caught.value)


def test_halves_and_their_faults(tmp_path):
    folder = write(tmp_path / "x", HALVES)
    assert same_bits(streamload.load_state_dict(folder)["w"], W)
    shutil.copy(folder / name_of(2), folder / name_of(4))
    with pytest.raises(CheckpointError, match="shard-00003-"):
        streamload.open_checkpoint(folder)
    (folder / name_of(4)).unlink()
    save_file({"w": W}, folder / name_of(2))
    with pytest.raises(CheckpointError, match="no DCP_SHARDING_INFO"):
        streamload.open_checkpoint(folder)
    for text in ("[1]", "{", '{"w": 3}'):
        save_file({"w": W}, folder / name_of(2), metadata={"DCP_SHARDING_INFO": text})
        with pytest.raises(CheckpointError, match="DCP_SHARDING_INFO"):
            streamload.open_checkpoint(folder)


@pytest.mark.parametrize("index", [False, True])
def test_sharded_consolidated_files(tmp_path, index):
    """Mistral's: whole tensors, each in one of the files."""
    names = [f"consolidated-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    tensors = {"tok_embeddings.weight": values(1, 5, 4), "norm.weight": values(2, 4)}
    for name, (key, tensor) in zip(names, tensors.items(), strict=True):
        save_file({key: tensor}, tmp_path / name)
    if index:
        weight_map = dict(zip(tensors, names, strict=True))
        text = json.dumps({"weight_map": weight_map})
        (tmp_path / "consolidated.safetensors.index.json").write_text(text)
    found = streamload.load_state_dict(tmp_path)
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match="consolidated-00002-of-00002"):
        streamload.open_checkpoint(tmp_path)


class TestConformance(SourceConformance):
    @pytest.fixture
    def source(self, written: Path) -> Iterator[Source]:
        with streamload.open_checkpoint(written / "hf-4") as source:
            yield source

    @pytest.fixture
    def expected(self, written: Path, tmp_path: Path) -> Mapping[str, Any]:
        found = by_torch(written / "pieces-4", tmp_path / "judge.pt", "model")
        return {name: t.contiguous() for name, t in found.items() if name != "turned"}
