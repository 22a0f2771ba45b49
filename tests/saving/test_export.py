"""``export``: published names again, bit for bit, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import streamload
from streamload import Concat, HeadSplit, NameMap, Rule, Split, Transpose
from streamload.core.errors import WriteError
from streamload.core.wording import printable
from streamload.saving import atomic, pipeline
from tests.support.tiny import (
    GPT2_CONFIG,
    Toy,
    bag_of,
    gpt2_tensors,
    meta_gpt2,
    open_descriptors,
    same_bits,
    toy_tensors,
    values,
    write,
    write_gpt2,
)


@pytest.fixture
def folder(tmp_path):
    return write_gpt2(tmp_path / "gpt2")


@pytest.fixture
def model(folder):
    return streamload.load(folder).model


def stored(path):
    return dict(streamload.iter_tensors(path))


def assert_gpt2(path):
    found = stored(path)
    assert set(found) == set(gpt2_tensors())
    assert all(same_bits(found[name], t) for name, t in gpt2_tensors().items())


@pytest.mark.parametrize("mode", ["stream", "map"])
@pytest.mark.parametrize("layout", ["contiguous", "stored"])
def test_a_round_trip_is_bit_equal(folder, tmp_path, mode, layout):
    model = streamload.load(folder, mode=mode, layout=layout).model
    report = streamload.export(model, tmp_path / "out.safetensors")
    assert_gpt2(tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors").keys() == gpt2_tensors().keys()
    assert len(report.written) == 28
    assert report.files == ("out.safetensors",)
    assert report.names == "published"


def test_a_folder_has_all_that_a_load_needs(model, tmp_path):
    streamload.export(model, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert GPT2_CONFIG.items() <= config.items()
    assert config["dtype"] == "float32"
    again = streamload.load(tmp_path / "out").model
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("slab_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_bytes", [None, 1, 300, 10**9])
def test_shards_dtypes_and_small_staging(
    model, tmp_path, monkeypatch, slab_bytes, dtype, max_shard_bytes
):
    monkeypatch.setattr(pipeline, "OUTPUT_CHUNK_BYTES", slab_bytes)
    report = streamload.export(
        model, tmp_path / "out", dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    found = stored(tmp_path / "out")
    wanted = getattr(torch, dtype or "float32")
    assert all(same_bits(found[name], t.to(wanted)) for name, t in gpt2_tensors().items())
    if max_shard_bytes in (1, 300):
        assert len(report.files) > 1
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(report.files)
        assert index["metadata"]["total_size"] == sum(
            t.numel() * wanted.itemsize for t in found.values()
        )
        for file in report.files:
            data = sum(
                t.numel() * wanted.itemsize for t in load_file(tmp_path / "out" / file).values()
            )
            largest = max(t.numel() * wanted.itemsize for t in found.values())
            assert data <= max(max_shard_bytes, largest)


def test_what_an_older_set_left_is_removed(model, tmp_path):
    out = tmp_path / "out"
    streamload.export(model, out, max_shard_bytes=300)
    first = set(os.listdir(out))
    (out / "README.md").write_text("mine")
    streamload.export(model, out, max_shard_bytes=500)
    second = set(os.listdir(out))
    assert not {n for n in first & second if n.startswith("model-")}
    assert_gpt2(out)
    streamload.export(model, out)
    assert set(os.listdir(out)) == {"README.md", "config.json", "model.safetensors"}
    assert_gpt2(out)
    streamload.export(model, out, max_shard_bytes=300)
    assert "model.safetensors" not in os.listdir(out)
    assert_gpt2(out)


@pytest.mark.parametrize("mode", ["stream", "map"])
@pytest.mark.parametrize("whole_folder", [True, False])
def test_onto_its_own_source(folder, mode, whole_folder):
    path = folder if whole_folder else f"{folder}/model.safetensors"
    model = streamload.load(folder, mode=mode).model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    streamload.export(model, path)
    assert_gpt2(folder)
    assert all(same_bits(p, before[n]) for n, p in model.named_parameters())


class TestOtherModules:
    def test_own_names_without_a_table(self, tmp_path):
        module = Toy()
        streamload.load_into(module, write(tmp_path / "toy.safetensors", toy_tensors()))
        report = streamload.export(module, tmp_path / "out.safetensors")
        found = stored(tmp_path / "out.safetensors")
        assert set(found) == set(toy_tensors()), "ties once, persistent buffers too"
        assert all(same_bits(found[n], t) for n, t in toy_tensors().items())
        assert report.names == "local"

    def test_a_cast_leaves_integers_alone(self, tmp_path):
        module = Toy()
        streamload.export(module, tmp_path / "out.safetensors", dtype="bfloat16")
        found = stored(tmp_path / "out.safetensors")
        assert found["steps"].dtype == torch.int64
        assert found["scale"].dtype == torch.bfloat16

    @pytest.mark.parametrize(
        "rule",
        [
            Rule(("qa", "ka", "va"), "w", Concat(0, (6, 3, 3))),
            Rule("w1", "w", Transpose()),
            Rule("fused", ("w", "v"), Split(0)),
            Rule("fused", ("w", "v"), HeadSplit(3, 2)),
        ],
    )
    def test_tables_are_walked_backwards(self, tmp_path, rule):
        tensors = {"w": values(1, 12, 5), "v": values(2, 12, 5)}
        rules = (rule,) if len(rule.targets) > 1 else (rule, Rule("v", "v"))
        module = bag_of(tensors, device="cpu")
        with torch.no_grad():
            for name, tensor in tensors.items():
                module.get_parameter(name).copy_(tensor)
        streamload.export(module, tmp_path / "out.safetensors", mapping=NameMap(rules))
        again = bag_of(tensors)
        streamload.load_into(again, tmp_path / "out.safetensors", mapping=NameMap(rules))
        assert all(same_bits(again.get_parameter(n), t) for n, t in tensors.items())

    def test_a_dict_and_what_cannot_be_walked(self, tmp_path):
        module = bag_of({"w": values(1, 2)}, device="cpu")
        streamload.export(module, tmp_path / "o.safetensors", mapping={"stored": "w"})
        assert stored(tmp_path / "o.safetensors").keys() == {"stored"}
        with pytest.raises(TypeError, match="function"):
            streamload.export(module, tmp_path / "o.safetensors", mapping=lambda n: n)
        with pytest.raises(streamload.PlanError, match="'w'"):
            streamload.export(module, tmp_path / "o.safetensors", mapping={"stored": "other"})

    def test_uneven_parts_of_heads_are_refused(self, tmp_path):
        module = bag_of({"w": values(1, 12, 5), "v": values(2, 18, 5)}, device="cpu")
        table = NameMap((Rule("fused", ("w", "v"), HeadSplit(3, 2)),))
        with pytest.raises(streamload.PlanError, match=r"'w', 'v'.*equal parts"):
            streamload.export(module, tmp_path / "o.safetensors", mapping=table)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("other", [Rule("x", "v"), Rule("x", "v", Transpose())])
    def test_two_tensors_under_one_published_name_are_refused(self, tmp_path, other):
        module = bag_of({"w": values(1, 3, 3), "v": values(2, 3, 3)}, device="cpu")
        table = NameMap((Rule("x", "w"), other))
        with pytest.raises(streamload.PlanError, match=r"'x' would be written twice.*'w'.*'v'"):
            streamload.export(module, tmp_path / "o.safetensors", mapping=table)
        assert os.listdir(tmp_path) == []

    def test_a_module_without_values(self, tmp_path):
        with pytest.raises(streamload.PlanError, match=r"'tok_embed\.weight'.*meta"):
            streamload.export(meta_gpt2(), tmp_path / "out")
        assert os.listdir(tmp_path) == []

    def test_strided_and_expanded_parameters(self, tmp_path):
        module = nn.Module()
        module.a = nn.Parameter(values(1, 6, 4).t())
        module.b = nn.Parameter(values(2, 6, 8)[:, ::2])
        module.c = nn.Parameter(values(3, 4)[None].expand(3, 4), requires_grad=False)
        streamload.export(module, tmp_path / "out.safetensors")
        found = stored(tmp_path / "out.safetensors")
        for name, parameter in module.named_parameters():
            assert torch.equal(found[name], parameter)

    def test_empty_and_scalar(self, tmp_path):
        module = nn.Module()
        module.a = nn.Parameter(torch.zeros(0, 3))
        module.b = nn.Parameter(torch.tensor(2.5))
        streamload.export(module, tmp_path / "out.safetensors")
        found = stored(tmp_path / "out.safetensors")
        assert found["a"].shape == (0, 3)
        assert found["b"].shape == ()


class TestOtherIndexes:
    """What an index in the folder says, whoever wrote it, costs nobody a file or a value."""

    @pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 300}])
    @pytest.mark.parametrize("name", ["other.safetensors.index.json", "X.SAFETENSORS.INDEX.JSON"])
    def test_a_foreign_one_would_go_on_deciding(self, model, tmp_path, options, name):
        write(tmp_path / "out" / "old.safetensors", {"w": values(1, 3)})
        (tmp_path / "out" / name).write_text('{"weight_map": {"w": "old.safetensors"}}')
        before = sorted(os.listdir(tmp_path / "out"))
        with pytest.raises(WriteError, match=rf"{name}.*another folder"):
            streamload.export(model, tmp_path / "out", **options)
        assert sorted(os.listdir(tmp_path / "out")) == before

    def test_only_safetensors_of_the_folder_are_taken_for_old_ones(self, model, tmp_path):
        out = tmp_path / "out"
        write(out / "old.safetensors", {"w": values(1, 3)})
        write(out / "part" / "x.safetensors", {"v": values(1, 3)})
        kept = ["notes.txt", "config.yaml", "pytorch_model.bin", "folder.safetensors/x"]
        (out / "folder.safetensors").mkdir()
        for name in kept:
            (out / name).write_text("mine")
        named = [*kept[:3], "folder.safetensors", "part/x.safetensors", "old.safetensors", "gone"]
        weight_map = {f"t{i}": name for i, name in enumerate(named)}
        index = out / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        streamload.export(model, out)
        assert all((out / name).read_text() == "mine" for name in kept)
        assert (out / "part" / "x.safetensors").exists()
        assert not (out / "old.safetensors").exists()
        assert not index.exists()
        assert_gpt2(out)


class TestUnwritable:
    """What no reader of safetensors would take is refused by name before anything is written."""

    def refuse(self, module, tmp_path, match):
        for name in ("out", "x.safetensors"):
            with pytest.raises(streamload.PlanError, match=match):
                streamload.export(module, tmp_path / name)
        assert os.listdir(tmp_path) == []

    def test_a_type_it_has_not(self, tmp_path):
        module = nn.Module()
        module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
        self.refuse(module, tmp_path, "'w' cannot be written: .* complex128")

    def test_the_name_of_the_header_itself(self, tmp_path):
        module = bag_of({"__metadata__": torch.zeros(2)}, device="cpu")
        self.refuse(module, tmp_path, "'__metadata__' cannot be written")

    def test_a_name_that_is_no_text(self, tmp_path):
        module = bag_of({"a\ud800": torch.zeros(2)}, device="cpu")
        self.refuse(module, tmp_path, r"'a\\ud800' cannot be written: .*Unicode")

    def test_a_configuration_with_odd_text_is_escaped(self, model, tmp_path):
        model.published_config = {**GPT2_CONFIG, "note": "ü\ud800"}
        streamload.export(model, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "ü\ud800"


@pytest.mark.parametrize(
    ("most", "kind"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), ("9", TypeError)],
)
def test_a_bound_that_is_none(model, folder, tmp_path, most, kind):
    for name in ("out", "x.safetensors"):
        with pytest.raises(kind, match="max_shard_bytes"):
            streamload.export(model, tmp_path / name, max_shard_bytes=most)
        with pytest.raises(kind, match="max_shard_bytes"):
            streamload.convert(folder, tmp_path / name, max_shard_bytes=most)
    assert os.listdir(tmp_path) == ["gpt2"]


class TestFailures:
    """Whatever happens, what was there is whole, and no half file carries a final name."""

    @pytest.fixture(autouse=True)
    def _nothing_open(self):
        before = open_descriptors()
        yield
        assert open_descriptors() == before

    def targets(self, tmp_path, kind):
        out = tmp_path / "out"
        if kind == "file":
            write(out / "x.safetensors", {"old": values(1, 3)})
            return out / "x.safetensors", {}
        write(out / "model.safetensors", {"old": values(1, 3)})
        return out, {"max_shard_bytes": 300} if kind == "shards" else {}

    def old_is_whole(self, path):
        assert stored(path).keys() == {"old"}
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        assert len(os.listdir(folder)) == 1, os.listdir(folder)

    @pytest.mark.parametrize("kind", ["file", "folder", "shards"])
    @pytest.mark.parametrize("at", [1, 2, 9, 29])
    @pytest.mark.parametrize(
        "fault",
        [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt(), MemoryError()],
        ids=repr,
    )
    def test_a_write_that_fails(self, model, tmp_path, monkeypatch, kind, at, fault):
        path, options = self.targets(tmp_path, kind)
        count, inner = [0], os.pwrite

        def pwrite(*arguments):
            count[0] += 1
            if count[0] == at:
                raise fault
            return inner(*arguments)

        monkeypatch.setattr(os, "pwrite", pwrite)
        expected = WriteError if isinstance(fault, OSError) else type(fault)
        with pytest.raises(expected) as info:
            streamload.export(model, path, **options)
        if expected is WriteError:
            assert "No space left" in str(info.value)
            assert str(tmp_path / "out") in str(info.value)
            assert info.value.errno == errno.ENOSPC
        self.old_is_whole(path)

    @pytest.mark.parametrize("kind", ["file", "folder", "shards"])
    @pytest.mark.parametrize("call", ["fsync", "open"])
    def test_other_calls_that_fail(self, model, tmp_path, monkeypatch, kind, call):
        path, options = self.targets(tmp_path, kind)
        inner = getattr(os, call)

        def fail(*arguments, **options):
            if call == "open" and "dir_fd" not in options:
                return inner(*arguments, **options)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(WriteError, match="Input/output error"):
                streamload.export(model, path, **options)
        self.old_is_whole(path)

    @pytest.mark.parametrize("at", range(1, 6))
    def test_a_rename_that_fails_leaves_a_set_that_loads(self, model, tmp_path, monkeypatch, at):
        path, options = self.targets(tmp_path, "shards")
        count, inner = [0], os.replace

        def replace(*arguments, **options):
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.EIO, "Input/output error")
            inner(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(WriteError):
                streamload.export(model, path, **options)
        assert stored(path).keys() == {"old"}
        assert not [n for n in os.listdir(path) if n.endswith(".tmp")]
        streamload.export(model, path, **options)
        assert_gpt2(path)

    @pytest.mark.parametrize("at", range(1, 6))
    def test_a_rename_that_fails_leaves_no_shards_without_an_index(
        self, model, tmp_path, monkeypatch, at
    ):
        out = tmp_path / "out"
        out.mkdir()
        (out / "README.md").write_text("mine")
        count, inner = [0], os.replace

        def replace(*arguments, **options):
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.EIO, "Input/output error")
            inner(*arguments, **options)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(WriteError):
            streamload.export(model, out, max_shard_bytes=300)
        assert os.listdir(out) == ["README.md"]

    def test_no_room_is_told_before_anything_is_written(self, model, tmp_path, monkeypatch):
        path, options = self.targets(tmp_path, "shards")
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: Usage())
        with pytest.raises(WriteError, match=r"no room: .* 100 are free"):
            streamload.export(model, path, **options)
        self.old_is_whole(path)

    def test_a_file_size_limit(self, folder, tmp_path):
        path, _ = self.targets(tmp_path, "file")
        code = (
            "import resource, signal, sys, streamload\n"
            "model = streamload.load(sys.argv[1]).model\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
            "try:\n"
            "    streamload.export(model, sys.argv[2])\n"
            "except streamload.WriteError as error:\n"
            "    print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, folder, str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "no room" in done.stdout
        assert str(path) in done.stdout
        self.old_is_whole(path)

    def test_a_kill_at_any_moment_leaves_the_old_or_the_new(self, folder, tmp_path):
        """SIGKILL at each of the first calls that change the folder."""
        code = (
            "import os, signal, sys, streamload\n"
            "from streamload.saving import atomic\n"
            "model = streamload.load(sys.argv[1]).model\n"
            "left = int(sys.argv[3])\n"
            "def counted(inner):\n"
            "    def call(*a, **k):\n"
            "        global left\n"
            "        left -= 1\n"
            "        if left < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        return inner(*a, **k)\n"
            "    return call\n"
            "for name in ('pwrite', 'replace', 'rename', 'unlink', 'fsync'):\n"
            "    setattr(os, name, counted(getattr(os, name)))\n"
            "streamload.export(model, sys.argv[2], max_shard_bytes=800)\n"
        )
        for at in (3, 40, 47):
            out = tmp_path / f"out{at}"
            write(out / "model.safetensors", {"old": values(1, 3)})
            subprocess.run([sys.executable, "-c", code, folder, str(out), str(at)], check=False)
            found = stored(out)
            assert found.keys() in ({"old"}, gpt2_tensors().keys())
            streamload.export(streamload.load(folder).model, out)
            assert_gpt2(out)
            assert not [n for n in os.listdir(out) if n.endswith(".tmp")]


class Usage:
    free = 100


@pytest.mark.parametrize("name", ["n" * 240 + ".safetensors", "ü" * 110 + ".safetensors"])
def test_long_names(model, tmp_path, name):
    streamload.export(model, tmp_path / name)
    assert_gpt2(tmp_path / name)
    assert os.listdir(tmp_path / "gpt2")


def test_two_exports_at_once_to_one_path_leave_one_whole_file(model, tmp_path):
    import threading

    errors = []

    def run():
        try:
            streamload.export(model, tmp_path / "out.safetensors")
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert_gpt2(tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("path", "options", "kind"),
    [
        ("there/x.safetensors", {}, None),
        ("taken", {}, WriteError),
        ("folder.safetensors", {}, WriteError),
        ("taken/x.safetensors", {}, WriteError),
        ("x.safetensors", {"max_shard_bytes": 100}, ValueError),
        ("x", {"dtype": "int8"}, ValueError),
        ("a\0b", {}, WriteError),
        ("a\0b.safetensors", {}, WriteError),
        ("a\0b/x.safetensors", {}, WriteError),
        ("a\0b/x", {"max_shard_bytes": 300}, WriteError),
        ("a\ud800", {}, WriteError),
        ("a\ud800.safetensors", {}, WriteError),
    ],
)
def test_where_to(model, tmp_path, path, options, kind):
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "folder.safetensors").mkdir()
    if kind is None:
        streamload.export(model, tmp_path / path, **options)
        assert_gpt2(tmp_path / path)
        return
    with pytest.raises(kind) as info:
        streamload.export(model, os.path.join(tmp_path, path), **options)
    if kind is WriteError:
        assert printable(os.path.join(tmp_path, path)) in str(info.value)
    assert (tmp_path / "taken").read_text() == "a file"


def test_the_mode_of_the_file_is_kept(model, tmp_path):
    path = tmp_path / "x.safetensors"
    streamload.export(model, path)
    os.chmod(path, 0o640)
    streamload.export(model, path)
    assert os.stat(path).st_mode & 0o777 == 0o640
