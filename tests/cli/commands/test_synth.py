"""``streamload synth``."""

import json
import os

from streamload.cli.commands import synth
from streamload.synthesis import PRESETS


def test_writes_and_says_so(run, tmp_path):
    result = run("synth", "gpt2-tiny", tmp_path / "x", "--dtype", "bf16", "--layers", 1)
    assert result.exit_code == 0
    assert "17 tensors" in result.stdout
    assert sorted(os.listdir(tmp_path / "x")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    again = run("synth", "gpt2-tiny", tmp_path / "x", "--dtype", "bf16", "--layers", 1)
    assert "is there already" in again.stdout
    other = run("synth", "gpt2-tiny", tmp_path / "x")
    assert other.exit_code == 1
    assert "--force" in other.stderr
    assert run("synth", "gpt2-tiny", tmp_path / "x", "--force").exit_code == 0


def test_json(run, tmp_path):
    result = run("synth", "gpt2-tiny", tmp_path, "--json", "--max-shard-bytes", "100kB")
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert len([file for file in report["files"] if file.endswith(".safetensors")]) > 3


def test_raw_neox(run, tmp_path):
    small = ("--layers", 1, "--hidden", 64, "--vocab-size", 256, "--partitions", 1)
    assert run("synth", "neox-20b-raw", tmp_path / "x", *small).exit_code == 0
    assert "layer_02-model_00-model_states.pt" in os.listdir(tmp_path / "x/global_step150000")


def test_options_of_the_other_kind_are_wrong_usage(run, tmp_path):
    result = run("synth", "gpt2-tiny", tmp_path, "--partitions", 2)
    assert result.exit_code == 2
    assert "--partitions cannot be used with gpt2-tiny" in result.stderr
    assert run("synth", "neox-20b-raw", tmp_path, "--no-masks").exit_code == 2
    assert run("synth", "gpt3", tmp_path).exit_code == 2


def test_help_names_every_preset():
    listed = synth.command.help.split("NAME is one of:")[1].split()
    assert sorted(listed) == sorted([*PRESETS, "neox-20b-raw"])
