"""The command line with models that only transformers has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from click.testing import CliRunner

from streamload.cli import main
from tests.hf.their_dozen import saved


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_moe", tmp_path_factory.mktemp("experts") / "qwen3_moe")


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_load_falls_back_to_the_library_s_class(experts: Path) -> None:
    report = json.loads(run("load", experts, "--json"))
    assert report["model_type"] == "qwen3_moe"
    assert any(t["name"].endswith("experts.gate_up_proj") for t in report["loaded"])
    told = "streamload has no model of its own for 'qwen3_moe': transformers' class is loaded"
    assert told in report["notices"]
    assert told in json.loads(run("plan", experts, "--json"))["notices"]
    assert told not in json.loads(run("load", experts, "--transformers", "--json"))["notices"]


def test_load_takes_it_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    here = json.loads(run("load", folder, "--json"))
    theirs = json.loads(run("load", folder, "--transformers", "--json"))
    assert {t["name"] for t in here["loaded"]}.isdisjoint(
        {t["name"] for t in theirs["loaded"]} - {"lm_head.weight"}
    )


def test_generate_gives_the_library_s_tokens(experts: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(experts)
    ids = torch.tensor([[5, 7, 11]])
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    found = json.loads(
        run("generate", experts, "--tokens", "5,7,11", "--max-new-tokens", "6", "--json")
    )
    assert found["tokens"] == wanted[0, 3:].tolist()


def test_a_model_that_does_not_continue_texts(tmp_path: Path) -> None:
    folder = saved("t5", tmp_path / "t5")
    said = run("generate", folder, "--tokens", "5,7", code=1)
    assert "cannot continue a text" in said


def test_without_the_extra_it_is_named(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.hf.installed.find_spec", lambda name: None)
    said = run("load", experts, code=1)
    assert "extra transformers" in said
