"""The command line as a whole: help, lazy imports, completion, exit codes, one line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import streamload
from streamload.cli.types import DTYPE
from streamload.synthesis import synthesize

COMMANDS = ["demo", "inspect", "plan", "load", "generate", "synth"]
ALL = [*COMMANDS, "convert", "verify", "download", "cache", "bench"]
IMPORTED = """
import sys
from streamload.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "numpy", "rich", "transformers", "tokenizers"} & sys.modules.keys()
print(sorted(heavy), len(sys.modules), file=sys.stderr)
"""


def heavy_imports(*args):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *args], capture_output=True, text=True, check=True
    )
    heavy, _, count = done.stderr.strip().rpartition(" ")
    assert int(count) < 300, "seconds are measured in bench/test_speed.py"
    return heavy


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_ends_with_an_example(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Example: streamload {name}" in result.stdout.strip().split("\n\n")[-1]
    assert "--json" in result.stdout


@pytest.mark.parametrize("name", ALL)
def test_help_shows_no_escapes(run, name):
    text = run(name, "--help").stdout
    assert "\\b" not in text
    assert "\b" not in text


def test_lists_in_help_keep_their_lines(run):
    cache = run("cache", "--help").stdout.splitlines()
    assert any(line.split()[:2] == ["clear", "remove"] for line in cache)
    synth = [line.strip() for line in run("synth", "--help").stdout.splitlines()]
    assert "gpt2 gpt2-medium gpt2-large gpt2-xl gpt2-stub gpt2-tiny" in synth
    download = run("download", "--help").stdout.splitlines()
    assert any(line.split()[:1] == ["neox-20b"] for line in download)


def test_help_and_inspect_import_nothing_heavy(tiny):
    assert heavy_imports("--help") == "[]"
    assert heavy_imports("inspect", tiny) == "[]"
    assert heavy_imports("inspect", tiny, "--json") == "[]"
    assert heavy_imports("synth", "--help") == "[]"


def test_shell_completion_knows_the_commands(spawn):
    env = {
        "_STREAMLOAD_COMPLETE": "bash_complete",
        "COMP_WORDS": "streamload in",
        "COMP_CWORD": "1",
    }
    assert "plain,inspect" in spawn(env=env).stdout
    assert "_STREAMLOAD_COMPLETE" in spawn(env={"_STREAMLOAD_COMPLETE": "bash_source"}).stdout


def test_wrong_usage_is_2(run):
    for args in (("frobnicate",), ("inspect",), ("load", "x", "--mode", "fly"), ("--nope",)):
        assert run(*args).exit_code == 2


def test_a_path_that_is_not_there_is_one_line_and_1(spawn, tmp_path):
    for command in ("inspect", "plan", "load"):
        done = spawn(command, tmp_path / "no where")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("streamload: error: ")
        assert "no where" in done.stderr


def test_json_of_a_failure_is_on_stdout_and_the_line_on_stderr(run, tmp_path):
    result = run("inspect", tmp_path / "nowhere", "--json")
    assert result.exit_code == 1
    failure = json.loads(result.stdout)
    assert failure["ok"] is False
    assert "nowhere" in failure["error"]
    assert result.stderr == f"streamload: error: {failure['error']}\n"


@pytest.mark.parametrize("where", ["before", "after"])
def test_traceback_on_request(run, tmp_path, where):
    args = ["inspect", tmp_path / "nowhere"]
    args = ["--traceback", *args] if where == "before" else [*args, "--traceback"]
    result = run(*args)
    assert "Traceback (most recent call last)" in result.stderr
    assert result.exit_code == 1
    assert "Traceback" not in run("inspect", tmp_path / "nowhere").stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_is_130_and_leaves_no_file(tmp_path):
    target = tmp_path / "big"
    process = subprocess.Popen(
        [sys.executable, "-m", "streamload", "synth", "mistral-7b", target, "--layers", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    # It is written under another name beside its own.
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "streamload: error: interrupted\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_a_reader_that_goes_away_is_quiet(tiny):
    process = subprocess.Popen(
        [sys.executable, "-m", "streamload", "inspect", tiny, "--all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=30)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("lod",), "no such command 'lod'; did you mean 'load'?"),
        (("export",), "use streamload.export in Python"),
        (("synth", "gpt-2", "x"), "did you mean 'gpt2'?"),
        (("load", "x", "--dtype", "int8"), "choose one of float16, bfloat16, float32"),
        (("synth", "gpt2", "x", "--dtype", "float64"), "one of float32, float16, bfloat16"),
    ],
)
def test_wrong_names_get_a_hint(run, args, says):
    result = run(*args)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_completion_of_dtypes_has_only_those_accepted():
    found = [item.value for item in DTYPE.shell_complete(None, None, "")]
    assert "bfloat16" in found
    assert "int8" not in found
    assert all(DTYPE.convert(name, None, None) == name for name in found)


@pytest.mark.parametrize("args", [("--version",), ("load", "--version"), ("cache", "--version")])
def test_version(run, args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (
        0,
        f"streamload, version {streamload.__version__}\n",
    )


@pytest.mark.parametrize("name", ALL)
def test_every_command_can_be_quiet(run, name):
    assert "-q, --quiet" in run(name, "--help").stdout


def test_quiet_says_only_what_was_asked_for(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "out"
    commands = [("-q", "load", tiny), ("convert", tiny, target, "-q"), ("verify", tiny, "--quiet")]
    for args in (*commands, ("demo", target / "d", "-q")):
        result = run(*args)
        assert (result.exit_code, result.output) == (0, ""), args
    assert json.loads(run("load", tiny, "-q", "--json").stdout)["ok"] is True
    for args in (("inspect", tiny), ("plan", tiny), ("cache",)):
        assert run(*args, "-q").stdout == run(*args).stdout != ""
    failed = run(
        "verify", tiny, "--against", synthesize("gpt2-tiny", tmp_path / "o", seed=1).path, "-q"
    )
    assert failed.exit_code == 1
    assert "values differ" in failed.stdout
