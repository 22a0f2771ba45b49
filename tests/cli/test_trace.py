"""``streamload load --trace``."""

import json
import sys

import pytest


def test_json_has_memory_and_bytes_over_time(run, tiny, tmp_path):
    path = tmp_path / "trace.json"
    result = run("load", tiny, "--dtype", "bfloat16", "--trace", path)
    assert result.exit_code == 0, result.stderr
    trace = json.loads(path.read_text())
    memory, read = trace["memory"], trace["read"]
    assert len({len(values) for values in memory.values()}) == 1
    assert memory["elapsed_s"] == sorted(memory["elapsed_s"])
    assert max(memory["rss_bytes"]) > 50_000_000, "bytes held, torch included"
    assert read["total_bytes"] == 531_456 - 2 * 64 * 64 * 4
    assert read["done_bytes"][0] == 0
    assert read["done_bytes"][-1] == read["total_bytes"]
    assert read["elapsed_s"][-1] <= memory["elapsed_s"][-1] + 0.1
    assert trace["load"]["ok"] is True
    assert trace["dtype"] == "bfloat16"


def test_a_picture_is_a_png(run, tiny, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "trace.PNG"
    assert run("load", tiny, "--mode", "map", "--trace", path).exit_code == 0
    image = imread(path, format="png")
    assert image.shape[1] > 800
    assert image[..., :3].min() < 0.3 < image[..., :3].max()


def test_without_matplotlib_it_is_said_before_the_load(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("load", tiny, "--trace", tmp_path / "trace.png")
    assert result.exit_code == 1
    assert "pip install 'streamload[plot]'" in result.stderr
    assert result.stdout == ""
    assert run("load", tiny, "--trace", tmp_path / "trace.json").exit_code == 0


def test_other_endings_and_folders_that_are_not_there_are_wrong_usage(run, tiny, tmp_path):
    for path in (tmp_path / "trace.pdf", tmp_path / "no" / "trace.png"):
        result = run("load", tiny, "--trace", path)
        assert result.exit_code == 2
        assert "--trace" in result.stderr


def test_a_refused_load_leaves_no_trace(run, tiny, tmp_path):
    path = tmp_path / "trace.json"
    assert run("load", tiny, "--layers", "0,7", "--trace", path).exit_code != 0
    assert not path.exists()
