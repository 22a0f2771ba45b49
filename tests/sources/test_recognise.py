"""Files and folders of other kinds are named, with the way out; what is meant clearly is opened."""

from __future__ import annotations

import io
import os
import tarfile

import numpy as np
import pytest
import torch

import streamload
from tests.support.tiny import refused, values, write

W = {"w": values(1, 2, 3)}


def archived() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        out.addfile(tarfile.TarInfo("model.ckpt"), io.BytesIO())
    return stream.getvalue()


def arrays(save) -> bytes:
    stream = io.BytesIO()
    save(stream, np.zeros(3))
    return stream.getvalue()


KINDS = {
    "ggml": (b"lmgg" + bytes(200), "GGML"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(200), "HDF5"),
    "onnx": (b"\x08\x08\x12\x07pytorch" + bytes(200), "ONNX"),
    "npy": (arrays(np.save), "numpy"),
    "npz": (arrays(np.savez), "npz"),
    "tar": (archived(), "tar archive"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(200), "gzip"),
    "a path": (b"../../blobs/" + b"ab" * 32, "link that was copied"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    "config.json": (b'{\n  "model_type": "gpt2",\n  "n_layer": 2\n}\n', "JSON file"),
    "config.json on one line": (b'{"model_type": "gpt2", "n_layer": 2}', "JSON file"),
    "a page": (b"<!DOCTYPE html>", "web page"),
}


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin", "x.anything"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_other_kinds_are_named(tmp_path, kind, name):
    data, word = KINDS[kind]
    (tmp_path / name).write_bytes(data)
    with refused(tmp_path / name, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path / name)
    if kind == "npz" and name == "x.safetensors":
        word = "pickle"
    assert word in str(caught[0])


FOLDERS = {
    "distributed": (["__0_0.distcp", "__1_0.distcp"], "without the .metadata"),
    "of one rank": (["__0.metadata", "__0_0.distcp"], "saved for itself"),
    "gguf of several models": (["model-Q4.gguf", "model-Q8.gguf"], "pass the one that is meant"),
    "gguf in name only": (["model-Q4.gguf"], "expected b'GGUF'"),
    "keras": (["tf_model.h5"], "tf_model.h5"),
    "zero": (["global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"],
             "zero_to_fp32"),
    "zero 3": (["zero_pp_rank_0_mp_rank_00_model_states.pt",
                "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "zero_to_fp32"),
    "ranks": (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "each rank"),
    "Meta's": (["consolidated.00.pth", "consolidated.02.pth"], "consolidated.01.pth is absent"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_other_kinds_are_named(tmp_path, kind):
    names, word = FOLDERS[kind]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" * 64)
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert word in str(caught[0])


def test_a_folder_with_only_a_ckpt_opens(tmp_path):
    torch.save({"state_dict": W}, tmp_path / "epoch=1-step=10.ckpt")
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])
    torch.save({"state_dict": W}, tmp_path / "last.ckpt")
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert "last.ckpt" in str(caught[0])


@pytest.mark.parametrize("variant", ["fp16", "non_ema", "bf16"])
def test_a_variant_stands_back_for_the_plain_weights(tmp_path, variant):
    write(tmp_path / f"unet.{variant}.safetensors", {"w": W["w"] + 1})
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"] + 1)
    write(tmp_path / "unet.safetensors", W)
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])


def test_empty_placeholders_are_named(tmp_path):
    torch.save({"module": {"a": torch.empty(0), "b": torch.empty(0)}}, tmp_path / "x.pt")
    with refused(tmp_path / "x.pt", kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path / "x.pt")
    assert "ZeRO-3" in str(caught[0])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("gpt2", "hf:gpt2"),
        ("meta-llama/Llama-3.2-1B", "hf:meta-llama/Llama-3.2-1B"),
        ("hf://org/tiny", "hf:org/tiny"),
        ("https://huggingface.co/org/tiny", "hf:org/tiny"),
    ],
)
def test_a_name_on_the_hub_is_not_a_path(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused(path, kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint(path)
    assert name in str(caught[0])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--org--tiny"


def snapshot(repository, commit, *, weights):
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if weights:
        write(folder / "model.safetensors", W)


def test_the_only_snapshot_without_references_is_taken(repository):
    snapshot(repository, "a" * 40, weights=True)
    assert torch.equal(streamload.load_state_dict("hf:org/tiny", mapping=str)["w"], W["w"])
    snapshot(repository, "b" * 40, weights=True)
    with refused("hf:org/tiny", kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint("hf:org/tiny")
    assert "hf:org/tiny@" + "b" * 40 in str(caught[0])


def test_a_snapshot_of_the_configuration_alone_says_where_weights_are(repository):
    snapshot(repository, "a" * 40, weights=False)
    os.makedirs(repository / "refs")
    (repository / "refs" / "main").write_text("a" * 40)
    with refused("hf:org/tiny", kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint("hf:org/tiny")
    assert "streamload download hf:org/tiny" in str(caught[0])
    snapshot(repository, "b" * 40, weights=True)
    os.makedirs(repository / "blobs")
    (repository / "blobs" / "00.incomplete").write_text("")
    with refused("hf:org/tiny", kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint("hf:org/tiny")
    assert "hf:org/tiny@" + "b" * 40 in str(caught[0])
    assert "1 .incomplete" in str(caught[0])
