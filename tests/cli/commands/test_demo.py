"""``streamload demo``: the whole way, in a few seconds."""

import json


def test_demo(spawn, tmp_path):
    done = spawn("demo", "-v")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "cache/streamload/demo/gpt2-stub"
    # Little to write and to read; seconds are measured in bench/test_speed.py.
    assert sum(file.stat().st_size for file in folder.iterdir()) < 64 << 20
    assert str(folder) in done.stdout
    for part in (
        "h.11.mlp.c_proj.weight → blocks.11.mlp.fc2.weight",
        "148 tensors equal the file, bit for bit",
        "load_file, load_state_dict  ",
        'streamload.load("./my-model", dtype="bfloat16")',
        "loaded=148 missing=0 unexpected=0 shape_mismatch=0",
        "before: random weights",
        "after: loaded weights",
        "one tensor, counted once",
        "'h.3.mlp.c_fc.weight' has shape [192, 767]",
        "the model is untouched",
    ):
        assert part in done.stdout
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = json.loads(spawn("demo", "--json").stdout)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "made once only"
    assert again["ok"] is True
    assert again["before"] != again["after"]
    assert again["tied"] == ["tok_embed.weight", "lm_head.weight"]
    assert "h.3.mlp.c_fc.weight" in again["refusal"]
    assert again["equal_tensors"] == 148
    assert again["load_file"]["elapsed_s"] > 0
    # Two copies of the weights, the model's own and the file's, against none.
    written_bytes = again["load"]["bytes_mapped"]
    assert again["load_file"]["peak_rss_bytes"] > written_bytes
    assert again["load"]["memory"]["peak_rss_bytes"] < written_bytes


def test_demo_fails_if_nothing_changes(run, tmp_path, monkeypatch):
    monkeypatch.setattr("streamload.cli.render.trials.continuations", lambda *_: ("same", "same"))
    result = run("demo", tmp_path / "stub")
    assert result.exit_code == 1
    assert "same before and after" in result.stderr


def test_demo_without_a_home_works(spawn, tmp_path):
    (tmp_path / "file").write_text("")
    done = spawn("demo", env={"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
