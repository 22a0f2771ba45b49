"""A disk that is really full: a small tmpfs (needs the right to mount one; skipped elsewhere)."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

import streamload
from tests.support.loopback import Site, serve
from tests.support.tiny import bag_of, open_descriptors, same_bits, write

KIB = 1 << 10
SIZE = 512 * KIB
OLD = {"w": torch.arange(64.0)}
NEW = {f"t{i}": torch.full((64, 256), float(i)) for i in range(8)}  # 512 KiB and a header


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    try:
        made = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip("no file system may be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(params=["told before", "found out while writing"])
def knows(request, monkeypatch):
    """With and without the question for free room, which another process may prove wrong."""
    if request.param == "found out while writing":
        from streamload.saving import atomic, staged_folder

        for module in (atomic, staged_folder):
            monkeypatch.setattr(module, "check_space", lambda *_, **__: None)
    return request.param


def contents(folder):
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(path, name), "rb") as file:
                found[os.path.relpath(os.path.join(path, name), folder)] = file.read()
    return found


def fails(action, path, folder):
    """``action`` raises our error that names ``path``; the folder is as it was."""
    before, opened = contents(folder), open_descriptors()
    with pytest.raises(streamload.StreamloadError) as info:
        action()
    assert isinstance(info.value, OSError)
    assert str(path) in str(info.value)
    assert "no room" in str(info.value)
    assert contents(folder) == before
    assert open_descriptors() == opened


def test_export_onto_an_older_file(disk, knows):
    path = disk / "x.safetensors"
    write(path, OLD)
    module = bag_of(NEW, device="cpu")
    fails(lambda: streamload.export(module, path), path, disk)
    assert same_bits(streamload.load_state_dict(path)["w"], OLD["w"])
    streamload.export(bag_of(OLD, device="cpu"), path)


@pytest.mark.parametrize("max_shard_bytes", [None, 128 * KIB])
def test_export_of_a_folder(disk, knows, max_shard_bytes):
    folder = disk / "model"
    module = bag_of(NEW, device="cpu")
    options = {"max_shard_bytes": max_shard_bytes}
    fails(lambda: streamload.export(module, folder, **options), folder, disk)
    assert not folder.exists()
    streamload.export(bag_of(OLD, device="cpu"), folder)
    fails(lambda: streamload.export(module, folder, **options), folder, disk)
    assert streamload.load_state_dict(folder)["w"].shape == (64,)


def test_convert(disk, knows, tmp_path):
    source = write(tmp_path / "x.safetensors", NEW)
    target = disk / "y.safetensors"
    write(target, OLD)
    fails(lambda: streamload.convert(source, target), target, disk)
    assert streamload.convert(source, target, dtype="bfloat16").bytes_written == 256 * KIB


def test_the_cache_is_an_extra_that_may_fail(disk, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(disk / "cache"))
    source = write(tmp_path / "x.safetensors", NEW)
    module = bag_of(NEW)
    report = streamload.load_into(module, source, cache=True)
    assert any("no room" in n for n in report.notices), report.notices
    assert all(same_bits(module.get_parameter(n), t) for n, t in NEW.items())
    assert not any(os.path.getsize(os.path.join(disk, n)) > 64 * KIB for n in contents(disk))


def test_download(disk):
    from streamload.downloading.fetching import fetch

    data = os.urandom(SIZE * 2)
    path = disk / "x.bin"
    with serve(Site({"x.bin": data})) as site, pytest.raises(streamload.StreamloadError) as info:
        fetch(f"{site.url}/x.bin", str(path), pause_s=0.0)
    assert isinstance(info.value, OSError)
    assert str(path) in str(info.value)
    assert not path.exists(), "no half file carries the final name"
