"""``streamload load``."""

import json
from pathlib import Path

import pytest


def test_prints_the_report(run, tiny):
    result = run("load", tiny, "--dtype", "bfloat16", "--workers", 1, "--chunk-bytes", "64KiB")
    assert result.exit_code == 0
    assert "missing=0 unexpected=0 shape_mismatch=0" in result.stdout
    assert result.stderr == ""
    assert "blocks.0.attn.qkv.weight" not in result.stdout


def test_verbose_lists_assignments(run, tiny):
    out = run("load", tiny, "-v").stdout
    assert "h.0.attn.c_attn.weight → blocks.0.attn.qkv.weight" in out


def test_json_alone_is_on_stdout(spawn, tiny):
    done = spawn("load", tiny, "--mode", "stream", "--json")
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert report["ok"] is True
    assert report["bytes_read"] == 531_456 - 2 * 64 * 64 * 4, "masks are not read"


def test_a_refusal_is_one_line_and_json_on_request(spawn, tiny, tmp_path):
    config = {"vocab_size": 300, "n_layer": 12}
    for name in ("model.safetensors", "config.json"):
        with open(f"{tiny}/{name}", "rb") as file:
            (tmp_path / name).write_bytes(file.read())
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | config))
    done = spawn("load", tmp_path, "--json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 1500
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert len(report["missing"]) == 120
    assert report["error"] in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_norm_epsilon": 10**400},
        {"vocab_size": 2**63},
        {"n_embd": 2**62},
        {"n_layer": 10**12},
    ],
)
def test_absurd_configs_are_one_line_and_valid_json(run, tiny, tmp_path, changes):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((Path(tiny) / name).read_bytes())
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | changes))
    done = run("load", tmp_path, "--json")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "config.json" in done.stderr
    assert json.loads(done.stdout)["ok"] is False


def test_a_mapped_load_says_what_was_mapped(run, tiny, tmp_path):
    assert "mapped 0" not in run("load", tiny).stdout
    done = run("convert", tiny, tmp_path / "local", "--names", "local")
    assert done.stdout.startswith(f"{tmp_path / 'local'}: wrote ")
    text = run("load", tmp_path / "local", "--mode", "map").stdout
    assert "\nmapped " in text
    assert "wrote 0 B" not in text
    found = json.loads(run("load", tmp_path / "local", "--mode", "map", "--json").stdout)
    assert found["bytes_mapped"] > 0
    assert found["bytes_read"] == 0


def test_the_trace_written_is_named(run, tiny, tmp_path):
    result = run("load", tiny, "--trace", tmp_path / "a.json")
    assert result.stderr == f"trace written to {tmp_path / 'a.json'}\n"
    assert (tmp_path / "a.json").exists()
