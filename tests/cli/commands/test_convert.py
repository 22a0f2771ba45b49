"""``streamload convert``."""

import json


def test_says_what_was_written(run, tiny, tmp_path):
    result = run("convert", tiny, tmp_path / "out", "--dtype", "bfloat16", "--names", "local")
    assert result.exit_code == 0
    assert "wrote 28 tensors" in result.stdout
    assert "28 of 28 tensors were cast from float32 to bfloat16" in result.stdout
    assert run("load", tmp_path / "out", "--mode", "map").exit_code == 0


def test_json_alone_is_on_stdout(spawn, tiny, tmp_path):
    done = spawn("convert", tiny, tmp_path / "out", "--max-shard-bytes", "100kB", "--json")
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert report["ok"] is True
    assert report["names"] == "published"
    assert len(report["files"]) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == report["files"]


def test_shards_need_a_folder(run, tiny, tmp_path):
    result = run("convert", tiny, tmp_path / "x.safetensors", "--max-shard-bytes", "1MB")
    assert result.exit_code == 2
    assert "--max-shard-bytes needs a folder" in result.stderr


def test_a_failure_is_one_line(run, tmp_path):
    result = run("convert", tmp_path / "absent", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
