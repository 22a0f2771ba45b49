"""Odd paths, names and rights; as text, as Path, as a folder, from where one stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import streamload
from tests.support.tiny import bag, refused, values, write

W = {"w": values(1, 2, 3), "b": torch.tensor([0.5])}
ODD = {
    "blanks": "my models/my model.safetensors",
    "other alphabets": "modèles/重み.safetensors",
    "combining accent": "mode\u0301le/x.safetensors",
    "quotes": 'it\'s "here"/x.safetensors',
    "leading dash": "-rf/-x.safetensors",
    "percent": "a%20b/x%n.safetensors",
    "hash, question mark": "a#b?c/x.safetensors",
    "capital ending": "up/X.SAFETENSORS",
    "glob": "a[1]*/x?.safetensors",
    "new line": "a\nb/x\n.safetensors",
    "tilde": "~/x.safetensors",
    "dollar": "$HOME/x.safetensors",
    "colon": "c:d/x:y.safetensors",
    "backslash": "a\\b/x.safetensors",
    "emoji": "🙂/🙃.safetensors",
    "200 characters": "n" * 200 + "/x.safetensors",
    "not UTF-8": os.fsdecode(b"latin1_\xe9/x\xff.safetensors"),
    "escape sequence": "\x1b[31m/x.safetensors",
    "hub-like": "hf:org/x.safetensors",
    "dots": "a.safetensors/b.index/x.safetensors",
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("mode", ["stream", "map"])
def test_odd_paths_load_and_print(tmp_path, name, mode, monkeypatch):
    path = os.path.join(tmp_path, ODD[name])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    plain = write(tmp_path / "plain.safetensors", W)
    os.rename(plain, path)
    monkeypatch.chdir(tmp_path)
    folder = os.path.dirname(path)
    for given in (path, Path(path), folder, Path(folder), ODD[name], os.fsencode(path)):
        if given == "hf:org/x.safetensors":
            given = "./hf:org/x.safetensors"
        assert torch.equal(streamload.load_state_dict(given, mode=mode)["w"], W["w"])
        assert dict(streamload.iter_tensors(given)).keys() == W.keys()
        with pytest.raises(streamload.PlanError) as info:
            streamload.load_into(bag({"other": (1,)}), given)
        str(info.value).encode("utf-8")
        assert str(info.value).isprintable()
        str(info.value.report.to_dict()).encode("utf-8")
    assert os.listdir(folder) == [os.path.basename(path)], "nothing is written beside the file"


def test_damaged_files_of_odd_names_print_too(tmp_path):
    path = os.path.join(tmp_path, ODD["not UTF-8"])
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.write(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(streamload.CheckpointError) as info:
        streamload.open_checkpoint(path)
    assert str(info.value).isprintable()
    assert info.value.path == path


def test_read_only_files_and_folders_load(tmp_path):
    path = write(tmp_path / "ro" / "x.safetensors", W)
    os.chmod(path, 0o444)
    os.chmod(tmp_path / "ro", 0o555)
    try:
        for mode in ("stream", "map"):
            assert torch.equal(streamload.load_state_dict(path, mode=mode)["w"], W["w"])
    finally:
        os.chmod(tmp_path / "ro", 0o755)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, make):
    path = tmp_path / "x.safetensors"
    make(path)
    kind = streamload.CheckpointError
    with refused(path, kind=kind):
        streamload.open_checkpoint(path)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_devices_are_refused(path):
    with refused(path, kind=streamload.CheckpointError):
        streamload.open_checkpoint(path)


def test_a_socket_is_refused(tmp_path, monkeypatch):
    import socket

    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x.safetensors")
        with refused("x.safetensors", kind=streamload.CheckpointError):
            streamload.open_checkpoint("x.safetensors")


def test_a_path_with_nul_is_refused():
    with pytest.raises(streamload.CheckpointError):
        streamload.open_checkpoint("a\0b.safetensors")


def test_no_rights_is_an_error_of_ours(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", W)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    for name, given in (("open", path), ("listdir", tmp_path)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, denied)
            with pytest.raises(streamload.CheckpointError, match="Permission denied") as info:
                streamload.open_checkpoint(given)
        assert str(given) in str(info.value)


def test_the_command_line_takes_them_too(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"-caf\xe9.safetensors")
    os.rename(write(tmp_path / "plain.safetensors", W), path)
    for ending, code in ((b"", 0), (b".absent", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "streamload", "inspect", "--", path + ending],
            capture_output=True,
        )
        assert done.returncode == code, done.stderr
        assert len(done.stderr.splitlines()) == code
        assert b"Traceback" not in done.stderr
