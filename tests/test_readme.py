"""Every example in the README runs; checkpoints of real size are replaced by tiny ones."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_are_examples_of_both_kinds():
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds.count("python") >= 3
    assert kinds.count("bash") >= 2


def test_the_set_up_commands_stand_as_they_are_run():
    section = README.partition("<!-- set-up -->")[2].partition("<!-- /set-up -->")[0]
    commands = [line for line in section.splitlines() if line.startswith("pip install")]
    assert commands == [
        "pip install -c constraints.txt . && streamload demo",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_all_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from streamload.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {}
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "README.md", "exec"), names)
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "streamload"
            arguments = ["gpt2-tiny" if a == "gpt2-xl" else a for a in arguments]
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, (line, result.output)
