"""``streamload generate``: tokens and text as they come."""

import json
import shutil
import time

import pytest

import streamload

PROMPT_IDS = [1, 2, 3]


@pytest.fixture
def expected(tiny):
    model = streamload.load(tiny).model
    return list(streamload.generate(model, PROMPT_IDS, max_new_tokens=6))


def test_tokens(run, tiny, expected):
    result = run("generate", tiny, "--tokens", "1,2,3", "--max-new-tokens", 6)
    assert result.exit_code == 0
    assert result.stdout == " ".join(map(str, expected)) + "\n"
    assert "loaded=" in result.stderr
    assert "6 tokens in " in result.stderr


def test_json_has_exactly_these_keys(spawn, tiny, expected):
    start_s = time.perf_counter()
    done = spawn("generate", tiny, "--tokens", "1,2,3", "--max-new-tokens", 6, "--json")
    took_s = time.perf_counter() - start_s
    result = json.loads(done.stdout)
    assert list(result) == ["tokens", "text", "first_token_s", "elapsed_s", "load"]
    assert result["tokens"] == expected
    assert result["text"] is None
    assert result["load"]["ok"] is True
    assert 0 < result["elapsed_s"] < took_s
    # The kernel tells a process's start in steps of a hundredth of a second.
    assert result["load"]["elapsed_s"] < result["first_token_s"] < took_s + 0.02


def test_prompt_is_continued_as_text(run, tiny):
    from streamload.generation.tokenizer import load_tokenizer

    args = ("generate", tiny, "--prompt", "Hi ö", "--max-new-tokens", 8)
    result = json.loads(run(*args, "--json").stdout)
    assert result["text"] == load_tokenizer(tiny).decode(result["tokens"])
    assert run(*args).stdout == result["text"] + "\n"


def test_a_seed_repeats(run, tiny):
    args = ("generate", tiny, "--tokens", "5", "--temperature", 1, "--top-k", 50)
    outs = [run(*args, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]


def test_stop_token(run, tiny, expected):
    stop = expected[2]
    out = run("generate", tiny, "--tokens", "1,2,3", "--stop-token", stop).stdout
    assert out.split() == [str(token) for token in expected[: expected.index(stop)]]


def test_either_a_prompt_or_tokens(run, tiny):
    assert run("generate", tiny).exit_code == 2
    assert run("generate", tiny, "--prompt", "x", "--tokens", "1").exit_code == 2
    assert run("generate", tiny, "--prompt", "").exit_code == 2


def test_tokens_the_model_cannot_take(run, tiny):
    result = run("generate", tiny, "--tokens", "320")
    assert result.exit_code == 1
    assert "320" in result.stderr
    result = run("generate", tiny, "--tokens", "1", "--max-new-tokens", 64)
    assert result.exit_code == 1
    assert "64 positions" in result.stderr


def test_no_tokenizer_is_told_before_the_load(run, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"not even a checkpoint")
    result = run("generate", tmp_path, "--prompt", "x")
    assert result.exit_code == 1
    assert "no tokenizer" in result.stderr


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "tekken.json"])
def test_a_tokenizer_of_another_kind_is_named(run, tiny, tmp_path, name):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").rename(tmp_path / name)
    result = run("generate", tmp_path, "--prompt", "x")
    assert result.exit_code == 1
    assert f"only {name}, which is not read here" in result.stderr
    assert "save_pretrained" in result.stderr


def test_an_interruption_ends_the_line_first(run, tiny, monkeypatch):
    def one_then_stop(*_args, **_options):
        yield 7
        raise KeyboardInterrupt

    monkeypatch.setattr("streamload.generate", one_then_stop)
    result = run("generate", tiny, "--tokens", "1,2")
    assert result.exit_code == 130
    assert result.stdout == "7\n"
    assert "interrupted" in result.stderr
