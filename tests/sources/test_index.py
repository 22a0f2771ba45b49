"""Several files: shards, an index, and what lies beside them."""

import json
import os

import pytest
import torch

import streamload
from tests.support.tiny import bag_of, holds, open_descriptors, refused, write

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
TENSORS = {
    "a.weight": torch.full((2, 2), 1.0),
    "b.weight": torch.full((2,), 2.0),
    "c.weight": torch.full((3,), 3.0),
}
MAP = {"a.weight": FIRST, "b.weight": FIRST, "c.weight": SECOND}


def folder(path, weight_map=None, *, index=None):
    """The reference folder, with another map or another text as its index."""
    write(path / FIRST, {n: TENSORS[n] for n in ("a.weight", "b.weight")})
    write(path / SECOND, {"c.weight": TENSORS["c.weight"]})
    text = json.dumps({"metadata": {"total_size": 36}, "weight_map": weight_map or MAP})
    (path / INDEX).write_text(text if index is None else index)
    return path


def remove(*names):
    def do(path):
        for name in names:
            (path / name).unlink()

    return do


def cut(path):
    shard = path / SECOND
    shard.write_bytes(shard.read_bytes()[:-4])


def pointer(path):
    (path / SECOND).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    )


def directory(path):
    (path / SECOND).unlink()
    (path / SECOND).mkdir()


def fifo(path):
    (path / SECOND).unlink()
    os.mkfifo(path / SECOND)


def dangling(path):
    (path / SECOND).unlink()
    (path / SECOND).symlink_to("../blobs/nothing")


def empty(path):
    (path / SECOND).write_bytes(b"")


def both_damaged(path):
    cut(path)
    (path / FIRST).write_bytes(b"")


DAMAGED = {
    "shard missing": (remove(SECOND), [SECOND, "missing"]),
    "all shards missing": (remove(FIRST, SECOND), [FIRST, SECOND]),
    "shard cut": (cut, [SECOND, "'c.weight'"]),
    "shard a pointer": (pointer, [SECOND, "git-lfs"]),
    "shard a folder": (directory, [SECOND, "folder"]),
    "shard a FIFO": (fifo, [SECOND, "regular file"]),
    "shard a dangling link": (dangling, [SECOND]),
    "shard empty": (empty, [SECOND, "empty"]),
    "both damaged": (both_damaged, [FIRST, SECOND]),
    "no index, part 1 only": (remove(INDEX, SECOND), [SECOND]),
    "no index, part 2 only": (remove(INDEX, FIRST), [FIRST]),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("strict", [True, False])
def test_a_set_that_is_not_whole_is_refused(tmp_path, name, strict):
    damage, says = DAMAGED[name]
    damage(folder(tmp_path))
    module = bag_of(TENSORS)
    with refused(tmp_path, module, streamload.CheckpointError) as caught:
        streamload.load_into(module, tmp_path, strict=strict)
    assert all(word in str(caught[0]) for word in says), str(caught[0])


def test_every_missing_shard_is_listed(tmp_path):
    folder(tmp_path, {f"t{i}": f"part-{i}.safetensors" for i in range(30)})
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert len(caught[0].problems) == 30


REFUSED_MAPS = {
    "tensor in no shard": ({**MAP, "d.weight": SECOND}, ["'d.weight'", SECOND]),
    "value a number": ({**MAP, "c.weight": 2}, ["'c.weight'"]),
    "value null": ({**MAP, "c.weight": None}, ["'c.weight'"]),
    "value a list": ({**MAP, "c.weight": [SECOND]}, ["'c.weight'"]),
    "value empty": ({**MAP, "c.weight": ""}, ["'c.weight'"]),
    "value a blank": ({**MAP, "c.weight": " "}, ["missing"]),
    "dotdot": ({**MAP, "c.weight": "../out/secret.safetensors"}, ["'c.weight'"]),
    "dotdot inside": ({**MAP, "c.weight": "x/../../out/secret.safetensors"}, ["'c.weight'"]),
    "dotdot at the end": ({**MAP, "c.weight": "x/.."}, ["'c.weight'"]),
    "dot": ({**MAP, "c.weight": "."}, ["'c.weight'"]),
    "dot first": ({**MAP, "c.weight": "./" + SECOND}, ["'c.weight'"]),
    "absolute": ({**MAP, "c.weight": "/etc/passwd"}, ["'c.weight'"]),
    "double slash": ({**MAP, "c.weight": "//host/share"}, ["'c.weight'"]),
    "slash at the end": ({**MAP, "c.weight": SECOND + "/"}, ["'c.weight'"]),
    "NUL": ({**MAP, "c.weight": "c\0.safetensors"}, ["'c.weight'"]),
    "file url": ({**MAP, "c.weight": "file:///etc/passwd"}, ["'c.weight'"]),
    "http url": ({**MAP, "c.weight": "https://host/x.safetensors"}, ["'c.weight'"]),
    "backslash": ({**MAP, "c.weight": "..\\out\\secret.safetensors"}, ["'c.weight'"]),
    "drive": ({**MAP, "c.weight": "C:secret.safetensors"}, ["'c.weight'"]),
    "lone surrogate": ({**MAP, "c.weight": "\ud800.safetensors"}, ["missing"]),
    "the index itself": ({**MAP, "c.weight": INDEX}, [INDEX]),
}
REFUSED_TEXTS = {
    "map empty": ('{"weight_map":{}}', "weight_map"),
    "no map": ('{"metadata":{}}', "weight_map"),
    "map null": ('{"weight_map":null}', "weight_map"),
    "map a list": ('{"weight_map":[]}', "weight_map"),
    "a list": ("[]", "weight_map"),
    "html": ("<html>", INDEX),
    "empty file": ("", INDEX),
    "cut": ('{"weight_map":{"a.wei', INDEX),
    "pointer": ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", INDEX),
    "too deep": ("[" * 5000 + "]" * 5000, INDEX),
    "key twice": (
        json.dumps({"weight_map": MAP})[:-2] + f',"a.weight":"{SECOND}"}}}}',
        "a.weight",
    ),
    "map twice": (json.dumps({"weight_map": MAP})[:-1] + ',"weight_map":{}}', "weight_map"),
}


@pytest.mark.parametrize("name", [*REFUSED_MAPS, *REFUSED_TEXTS])
def test_an_index_at_fault_is_refused(tmp_path, name, monkeypatch):
    write(tmp_path / "out" / "secret.safetensors", {"c.weight": torch.full((3,), 73.0)})
    inside = tmp_path / "inside"
    if name in REFUSED_MAPS:
        weight_map, says = REFUSED_MAPS[name]
        folder(inside, weight_map)
    else:
        text, word = REFUSED_TEXTS[name]
        folder(inside, index=text)
        says = [word]
    module = bag_of(TENSORS)
    for path in (inside, inside / INDEX):
        with refused(path, module, streamload.CheckpointError) as caught:
            streamload.load_into(module, path)
        assert all(word in str(caught[0]) for word in says), str(caught[0])
        str(caught[0]).encode("utf-8")


def test_nothing_outside_of_the_folder_is_opened(tmp_path, monkeypatch):
    write(tmp_path / "out" / "secret.safetensors", {"c.weight": torch.ones(3)})
    inside = folder(tmp_path / "inside", {**MAP, "c.weight": "../out/secret.safetensors"})
    opened = []
    inner = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: (opened.append(path), inner(path, *rest))[1]
    )
    with pytest.raises(streamload.CheckpointError):
        streamload.open_checkpoint(inside)
    assert opened == [str(inside / INDEX)]


def test_all_bad_names_of_an_index_are_listed(tmp_path):
    folder(tmp_path, {"a": "../x", "b": "", "c": 2, "d": FIRST})
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert [p.split(":")[0] for p in caught[0].problems] == [f"tensor {n!r}" for n in "abc"]


def beside(name, tensors=None, data=b"junk"):
    def do(path):
        if tensors is None:
            (path / name).write_bytes(data)
        else:
            write(path / name, tensors)

    return do


OTHER = {name: t + 50 for name, t in TENSORS.items()}
ACCEPTED = {
    "reference": (None, {}),
    "no index, both parts": (remove(INDEX), {}),
    "byte order mark": (None, {"index": "\ufeff" + json.dumps({"weight_map": MAP})}),
    "total size wrong": (
        None,
        {"index": json.dumps({"metadata": {"total_size": 9999}, "weight_map": MAP})},
    ),
    "total size a float": (
        None,
        {"index": json.dumps({"metadata": {"total_size": 36.0}, "weight_map": MAP})},
    ),
    "no metadata": (None, {"index": json.dumps({"weight_map": MAP})}),
    "in the other shard": (None, {"weight_map": {**MAP, "b.weight": SECOND}}),
    "map incomplete": (None, {"weight_map": {"a.weight": FIRST, "c.weight": SECOND}}),
    "consolidated beside": (beside("consolidated.safetensors", OTHER), {}),
    "consolidated parts beside": (
        beside("consolidated-00001-of-00002.safetensors", OTHER),
        {},
    ),
    "single file beside": (beside("model.safetensors", OTHER), {}),
    "bin beside": (beside("pytorch_model.bin"), {}),
    "bin index beside": (beside("pytorch_model.bin.index.json"), {}),
    "stale third shard": (beside("model-00003-of-00003.safetensors", OTHER), {}),
    "AppleDouble": (beside("._" + FIRST, data=b"\0\5\26\7junk"), {}),
    "dot file": (beside(".model.safetensors"), {}),
    "incomplete download": (beside(SECOND + ".incomplete"), {}),
    "leftover of an export": (beside(".streamload-1-model.safetensors.tmp"), {}),
    "adapter and optimizer beside": (beside("adapter_model.safetensors", OTHER), {}),
    "training state": (beside("optimizer.pt"), {}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_index_decides_and_nothing_else_is_opened(tmp_path, name, monkeypatch):
    add, changes = ACCEPTED[name]
    folder(tmp_path, **changes)
    if add is not None:
        add(tmp_path)
    opened = []
    inner = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: (opened.append(path), inner(path, *rest))[1]
    )
    module = bag_of(TENSORS)
    report = streamload.load_into(module, tmp_path)
    assert report.ok
    assert holds(module, TENSORS)
    touched = {os.path.basename(p) for p in opened if str(p).startswith(str(tmp_path))}
    assert touched <= {FIRST, SECOND, INDEX, "config.json", "params.json"}
    assert not [p for p in open_descriptors() if p.startswith(str(tmp_path))]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({**MAP, "b.weight": SECOND}, ["'b.weight'", SECOND, FIRST]),
        ({"a.weight": FIRST, "c.weight": SECOND}, ["'b.weight'", "leaves out"]),
    ],
)
def test_what_the_index_has_wrong_is_told(tmp_path, weight_map, says):
    folder(tmp_path, weight_map)
    notices = streamload.load_into(bag_of(TENSORS), tmp_path).notices
    assert any(all(word in notice for word in says) for notice in notices)


def test_shards_in_a_subfolder(tmp_path):
    folder(tmp_path, {**MAP, "c.weight": "part/" + SECOND})
    (tmp_path / "part").mkdir()
    (tmp_path / SECOND).rename(tmp_path / "part" / SECOND)
    module = bag_of(TENSORS)
    streamload.load_into(module, tmp_path)
    assert holds(module, TENSORS)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_of_one_name_in_two_subfolders(tmp_path, swapped, ending):
    for part in "ab":
        path = tmp_path / part / f"x.{ending}"
        if ending == "bin":
            path.parent.mkdir()
            torch.save({part: TENSORS["c.weight"]}, path)
        else:
            write(path, {part: TENSORS["c.weight"]})
    weight_map = {"a": f"{'ab'[swapped]}/x.{ending}", "b": f"{'ba'[swapped]}/x.{ending}"}
    (tmp_path / f"x.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with streamload.open_checkpoint(tmp_path) as source:
        told = [n for n in source.catalog.notices if n.startswith("the index has 'a' in 'b/x.")]
    assert len(told) == swapped
    assert swapped or not source.catalog.notices


def test_a_shard_whose_index_names_nothing_of_it_is_not_needed(tmp_path):
    folder(tmp_path, {"a.weight": FIRST, "b.weight": FIRST})
    (tmp_path / SECOND).unlink()
    assert set(streamload.load_state_dict(tmp_path)) == {"a.weight", "b.weight"}


class TestDuplicateKeys:
    """A name in two shards: the index decides, or nobody does."""

    @pytest.fixture(params=["safetensors", "bin"])
    def make(self, request, tmp_path):
        """Both shards hold 'b', with other values; returns the values by shard's name."""

        def build(index):
            made = {}
            for at, name in enumerate("ac", 1):
                file = f"model-{at:05d}-of-00002.{request.param}"
                made[file] = {name: torch.full((2,), at), "b": torch.full((3,), at)}
                if request.param == "bin":
                    torch.save(made[file], tmp_path / file)
                else:
                    write(tmp_path / file, made[file])
            first, second = made
            maps = {
                "first": {"a": first, "b": first, "c": second},
                "second": {"a": first, "b": second, "c": second},
                "left out": {"a": first, "c": second},
            }
            if index:
                stem = "model" if request.param == "safetensors" else "pytorch_model"
                text = json.dumps({"weight_map": maps[index]})
                (tmp_path / f"{stem}.{request.param}.index.json").write_text(text)
            return tmp_path

        return build

    @pytest.mark.parametrize(("index", "expected"), [("first", 1), ("second", 2)])
    @pytest.mark.parametrize("mode", ["stream", "map"])
    def test_the_indexs_copy_is_loaded_and_told(self, make, index, expected, mode):
        path = make(index)
        assert streamload.load_state_dict(path, mode=mode)["b"].tolist() == [expected] * 3
        assert dict(streamload.iter_tensors(path))["b"].tolist() == [expected] * 3
        with streamload.open_checkpoint(path) as source:
            (notice,) = source.catalog.notices
            assert sorted(source.catalog) == ["a", "b", "c"]
        assert "duplicate key 'b'" in notice
        assert f"taken from {path}/model-{expected:05d}" in notice

    @pytest.mark.parametrize("index", [None, "left out"])
    def test_without_a_word_of_the_index_it_is_refused(self, make, index):
        with pytest.raises(streamload.CheckpointError, match="duplicate key 'b'") as info:
            streamload.open_checkpoint(make(index))
        assert len(info.value.problems) == 1
        assert all(f"model-{at:05d}-of-00002" in str(info.value) for at in (1, 2))
        assert not [p for p in open_descriptors() if "-of-00002" in p]

    def test_many_are_told_briefly(self, tmp_path):
        tensors = {f"t{i}": torch.ones(1) for i in range(10)}
        for file in (FIRST, SECOND):
            write(tmp_path / file, tensors)
        text = json.dumps({"weight_map": {**dict.fromkeys(tensors, FIRST), "t9": SECOND}})
        (tmp_path / INDEX).write_text(text)
        with streamload.open_checkpoint(tmp_path) as source:
            (notice,) = source.catalog.notices
            assert source.catalog["t9"].file.endswith(SECOND)
        assert notice.endswith("and 7 more duplicate keys")
