"""More shards than a process may have files open."""

from __future__ import annotations

import json
import os
import resource
import threading

import pytest
import torch
from click.testing import CliRunner

import streamload
from streamload.cli import main
from streamload.core.errors import CheckpointError, ReadError
from streamload.sources.files import OpenFile
from streamload.system import descriptors
from tests.support.tiny import container, entry, open_descriptors

COUNT, LIMIT = 1200, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("many"), COUNT)


@pytest.fixture
def few_descriptors():
    yield from limited(LIMIT)


def limited(most):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shards(folder, count):
    weight_map = {}
    for at in range(count):
        name = f"model-{at + 1:05d}-of-{count:05d}.safetensors"
        body = torch.tensor([float(at), 1.0]).numpy().tobytes()
        (folder / name).write_bytes(container({f"t{at}": entry("F32", [2], 0, 8)}, body))
        weight_map[f"t{at}"] = name
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def right(tensors, count=COUNT):
    return all(tensors[f"t{at}"].tolist() == [at, 1.0] for at in range(count))


@pytest.mark.usefixtures("few_descriptors")
class TestMoreShardsThanDescriptors:
    @pytest.mark.parametrize("mode", ["stream", "map"])
    def test_loads(self, folder, mode):
        assert right(streamload.load_state_dict(folder, mode=mode))

    def test_iterates(self, folder):
        assert right(dict(streamload.iter_tensors(folder)))

    def test_converts(self, folder, tmp_path):
        streamload.convert(folder, tmp_path / "one.safetensors")
        assert right(streamload.load_state_dict(tmp_path / "one.safetensors"))

    def test_writes_as_many(self, folder, tmp_path):
        report = streamload.convert(folder, tmp_path / "cut", max_shard_bytes=8)
        assert len(report.files) == COUNT
        assert right(streamload.load_state_dict(tmp_path / "cut"))

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_commands(self, folder, command):
        result = CliRunner().invoke(main, [command, str(folder), "--json"])
        assert result.exit_code == 0, result.output

    def test_few_are_open_at_once(self, folder):
        with streamload.open_checkpoint(folder) as source:
            source.check_unchanged()
            held = [link for link in open_descriptors() if link.startswith(str(folder))]
            assert 0 < len(held) <= 8
        assert not any(link.startswith(str(folder)) for link in open_descriptors())


def test_idle_files_make_room_for_others(tmp_path, folder):
    paths = sorted(str(path) for path in folder.glob("*.safetensors"))[:20]
    files = [OpenFile(path) for path in paths[:8]]
    free = os.open(paths[0], os.O_RDONLY)
    os.close(free)
    for _ in limited(free):  # not one more
        more = OpenFile(paths[10])
        assert more.read(8, 1) == b"{"
        assert all(file.read(8, 1) == b"{" for file in files)
    for file in [*files, more]:
        file.close()


def test_no_descriptor_at_all_is_one_sentence(folder):
    free = os.open(folder, os.O_RDONLY)
    os.close(free)
    for _ in limited(free):
        with pytest.raises(CheckpointError, match=f"all {free} files.*`ulimit -n") as info:
            streamload.open_checkpoint(folder / "model-00001-of-01200.safetensors")
    assert len(info.value.problems) == 1


def test_that_many_files_cannot_be_opened_is_said_once(folder, monkeypatch):
    inner = OpenFile._open

    def refuse(self):
        if "of-01200" in self.path and "00001" not in self.path:
            raise OSError(24, "Too many open files")
        return inner(self)

    monkeypatch.setattr(OpenFile, "_open", refuse)
    said = r"its 1200 files cannot be opened.*ulimit -n"
    with pytest.raises(CheckpointError, match=said) as info:
        streamload.open_checkpoint(folder)
    assert str(info.value).count("\n") == 0
    assert len(info.value.problems) == 1


class TestOpenedAgain:
    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(descriptors, "_MOST_IDLE", 0)
        (tmp_path / "x").write_bytes(b"one")
        with OpenFile(str(tmp_path / "x")) as file:
            yield file

    def test_reads_on(self, file, tmp_path):
        assert str(tmp_path / "x") not in open_descriptors()
        assert file.read(0, 3) == b"one"

    def test_from_another_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(descriptors, "_MOST_IDLE", 0)
        (tmp_path / "x").write_bytes(b"one")
        monkeypatch.chdir(tmp_path)
        with OpenFile("x") as file:
            monkeypatch.chdir("/")
            assert file.read(0, 3) == b"one"
            file.check_unchanged()

    def test_another_file_of_that_name_is_not_read(self, file, tmp_path):
        (tmp_path / "y").write_bytes(b"two")
        os.replace(tmp_path / "y", tmp_path / "x")
        with pytest.raises(ReadError, match=r"x: .*changed or replaced"):
            file.read(0, 3)

    def test_a_file_that_is_gone(self, file, tmp_path):
        os.unlink(tmp_path / "x")
        with pytest.raises(ReadError, match="No such file"):
            file.read(0, 3)

    def test_not_after_closing(self, file):
        file.close()
        with pytest.raises(ReadError, match="was closed"):
            file.read(0, 3)

    def test_by_many_threads(self, file):
        wrong = []

        def read():
            for _ in range(200):
                if file.read(0, 3) != b"one":
                    wrong.append(1)

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
