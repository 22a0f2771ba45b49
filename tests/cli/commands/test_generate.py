"""``streamload generate``: tokens and text as they come."""

import json
import os
import re
import shutil
import time

import pytest

import streamload
from tests.support.pseudo_terminal import on_a_terminal

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
    assert result["load"]["loaded"] == []
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


def test_a_wrong_path_is_told_as_one(run, tiny, tmp_path):
    result = run("generate", tmp_path / "nosuch", "--prompt", "x")
    assert result.exit_code == 1
    assert "nosuch: no such file or folder" in result.stderr
    (tmp_path / "notes.txt").write_text("x")
    result = run("generate", tmp_path, "--prompt", "x")
    assert "no checkpoint in this folder" in result.stderr
    (tmp_path / "notes.txt").unlink()
    shutil.copy(os.path.join(tiny, "model.safetensors"), tmp_path)
    assert "no tokenizer in this folder" in run("generate", tmp_path, "--prompt", "x").stderr


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


def test_json_lists_assignments_where_that_is_asked_for(run, tiny):
    args = ("generate", tiny, "--tokens", "1", "--max-new-tokens", 1)
    result = json.loads(run(*args, "--json", "--verbose").stdout)
    assert len(result["load"]["loaded"]) == 28
    assert "h.0.attn.c_attn.weight → blocks.0" in run(*args, "-v").stderr


def test_the_last_line_says_how_fast_it_was(run, tiny):
    line = run("generate", tiny, "--tokens", "1,2", "--max-new-tokens", 5).stderr.splitlines()[-1]
    pattern = (
        r"5 tokens in [\d.]+ s; first token [\d.]+ s after the process started; "
        r"[\d.]+ tokens/s; peak memory [\d.]+ (MiB|GiB)"
    )
    assert re.fullmatch(pattern, line), line


def test_quiet_is_the_text_alone(run, tiny, expected):
    result = run("generate", tiny, "--tokens", "1,2,3", "--max-new-tokens", 6, "-q")
    assert result.stdout == " ".join(map(str, expected)) + "\n"
    assert result.stderr == ""
    assert run("-q", "generate", tiny, "--tokens", "1").stderr == ""
    assert "error" in run("generate", tiny, "--tokens", "999", "-q").stderr


def test_a_text_ends_before_what_stops_it(run, tiny):
    args = ("generate", tiny, "--prompt", "Hi", "--max-new-tokens", 12)
    text = json.loads(run(*args, "--json").stdout)["text"]
    stop = text[4:6]
    cut = json.loads(run(*args, "--json", "--stop", stop, "--stop", "\0never").stdout)
    assert cut["text"] == text[: text.index(stop)]
    assert len(cut["tokens"]) < 12
    assert run(*args, "--stop", stop).stdout == cut["text"] + "\n"
    assert run(*args, "--stop", "").exit_code == 2


@pytest.fixture
def chatty(tiny, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    shutil.copytree(tiny, tmp_path / "chatty")
    config = {"chat_template": template, "bos_token": "!"}
    (tmp_path / "chatty" / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "chatty"


def test_a_chat_continues_its_template(run, chatty, tiny):
    def tokens(*args):
        result = run("generate", *args, "--max-new-tokens", 6, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["tokens"]

    assert tokens(chatty, "--chat", "--prompt", "Hi ö") == tokens(tiny, "--prompt", "!u:Hi ö;a:")
    system = tokens(chatty, "--chat", "--prompt", "Hi", "--system", "be")
    assert system == tokens(tiny, "--prompt", "!s:be;u:Hi;a:")
    shutil.copy(chatty / "tokenizer_config.json", chatty / "kept")
    (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert tokens(chatty, "--chat", "--prompt", "Hi") == tokens(tiny, "--prompt", "Hi?")


def test_a_chat_that_cannot_be_is_told_before_the_load(run, tiny, chatty):
    (chatty / "model.safetensors").write_bytes(b"not even a checkpoint")
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    result = run("generate", chatty, "--chat", "--prompt", "x")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "chat_template.jinja: cannot use the chat template: only tools" in result.stderr
    result = run("generate", tiny, "--chat", "--prompt", "x")
    assert result.exit_code == 1
    assert "no chat template with the tokenizer" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("--tokens", "1", "--chat"),
        ("--tokens", "1", "--stop", "x"),
        ("--prompt", "x", "--system", "y"),
        ("--prompt", "x", "--temperature", "nan"),
        ("--prompt", "x", "--temperature", "-1"),
        ("--prompt", "x", "--top-p", "0.9"),
        ("--prompt", "x", "--top-k", "5", "--seed", "1"),
        ("--prompt", "x", "--top-p", "inf"),
        ("--prompt", "x", "--top-p", "0"),
        ("--prompt", "x", "--timeout-s", "nan"),
    ],
)
def test_wrong_usage(run, tiny, wrong):
    assert run("generate", tiny, *wrong).exit_code == 2


@pytest.mark.parametrize("plain", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_on_a_terminal_the_prompt_stands_in_front(run, tiny, plain, tmp_path):
    args = ("generate", tiny, "--prompt", "Hi", "--max-new-tokens", 4)
    text = run(*args).stdout
    shown = on_a_terminal([*map(str, args)], **{"TERM": "xterm", "COLUMNS": "200", **plain})
    written = shown.replace("\r\n", "\n")
    before, after = ("", "") if plain else ("\x1b[2m", "\x1b[0m")
    assert f"{before}Hi{after}{text}" in written
    assert "loaded=" not in written, "the report is for --verbose"
    assert "4 tokens in" in written.splitlines()[-1]
    if plain.get("TERM") == "dumb":
        assert "\x1b" not in shown
