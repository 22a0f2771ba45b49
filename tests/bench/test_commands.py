"""What the commands ask for, refuse, show on a terminal, and draw from earlier figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bench.report
from bench import checkpoints, generate, scale
from bench.__main__ import main
from bench.job import Job, find_peers
from bench.report import tables
from bench.report.figures import read_lines
from streamload.core.wording import printable_lines
from tests.bench.figures_for_pictures import CASES, HEAD, LINES, line


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_DIR", str(tmp_path_factory.mktemp("bench")))
        return checkpoints.checkpoint("gpt2-tiny")


def said(*words: str) -> tuple[int, str]:
    run = CliRunner().invoke(main, list(words), prog_name="python -m bench")
    assert run.exception is None or isinstance(run.exception, SystemExit), run.output
    return run.exit_code, run.output


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(path)


def test_help_names_every_command_in_whole_sentences() -> None:
    code, text = said("--help")
    assert code == 0
    commands = re.findall(r"^  (\w+)  +(\S.*)$", text.split("Commands:")[1], re.MULTILINE)
    assert {name for name, _ in commands} == set(main.commands)
    assert all(words.endswith(".") and not words.endswith("...") for _, words in commands)


@pytest.mark.parametrize("command", ["compare", "generate", "scale", "device", "report", "peers"])
def test_every_option_says_what_it_is_for(command: str) -> None:
    options = [p for p in main.commands[command].params if p.param_type_name == "option"]
    assert all(getattr(option, "help", None) for option in options)


def test_peers_are_listed_with_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "LABEL, DELIVERS, IMPORTS = 'my loader', 'x', ('no_such_package',)\n"
        "def load(job):\n    pass\n"
    )
    code, text = said("peers", "--peers-dir", str(tmp_path))
    assert code == 0
    assert re.search(r"^mine +my loader +no_such_package is not installed$", text, re.MULTILINE)
    assert re.search(r"^floor_read +floor: read +yes$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty", None, "no checkpoint in this folder"),
        ("x.safetensors", b"no", "x.safetensors"),
        ("x.bin", b"no", "x.bin"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "generate"])
def test_what_is_no_checkpoint_is_wrong_usage(
    tmp_path: Path, command: str, name: str, content: bytes | None, told: str
) -> None:
    path = tmp_path / "here" / name
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    code, text = said(command, "--path", str(path), "--peers", "transformers")
    assert code == 2
    assert "--path" in text
    assert told in text
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_checkpoint_without_safetensors_is_told_the_way_out(tmp_path: Path) -> None:
    import torch

    torch.save({"a.weight": torch.ones(2)}, tmp_path / "x.bin")
    code, text = said("compare", "--path", str(tmp_path / "x.bin"))
    assert code == 2
    assert "streamload convert" in text


def test_no_success_is_a_failure(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "LABEL, DELIVERS, IMPORTS = 'my loader', 'x', ('no_such_package',)\n"
        "def load(job):\n    pass\n"
    )
    code, text = said("compare", "--path", tiny, "--peers", "mine", "--peers-dir", str(tmp_path))
    assert code == 1
    assert "no_such_package is not installed" in text


@pytest.mark.parametrize(
    ("dtype", "applies"), [("bfloat16", False), ("float32", True), (None, True)]
)
def test_mapping_has_no_part_where_all_is_cast(tiny: str, dtype: str | None, applies: bool) -> None:
    streamed, mapped = find_peers(["streamload_stream", "streamload_map"])
    job = Job(tiny, dtype, 1)
    assert streamed.unfit(job) is None
    assert (mapped.unfit(job) is None) == applies


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("case", ["ordinary", "many", "hostile", "all failed"])
def test_tables_fit_the_terminal(case: str, width: int) -> None:
    text = tables.report(CASES[case], width)
    assert text == printable_lines(text)  # else it would grow when it is printed
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    heads, rule, *rows = (line for line in lines if line.startswith("| "))
    assert "loader" in heads
    assert len({len(row) for row in (heads, rule, *rows)}) == 1
    if case == "ordinary":  # what has no figures is told in whole below
        assert "absent: x is not installed" in " ".join(lines)
        told = "streamload map: does not apply: every tensor is cast, so none can be mapped"
        assert told in " ".join(lines)
    if width >= 80 and case == "ordinary":
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (heads, *rows)]
        assert {"load + use s", "x floor", "peak RSS MiB", "values"} <= set(cells[0])
        assert cells[2][cells[0].index("x floor")] == "1.34"


def test_the_other_tables_fit_too() -> None:
    tokens = {
        "kind": "tokens", "label": "a loader", "dtype": "float32", "ok": False,
        "reason": "because of this and that " * 3, "other_cpus": 0.0, "stolen_cpus": 0.0,
    }  # fmt: skip
    head = {**HEAD, "tokens": 3}
    points = [{**line("a", 1.0 + n), "kind": "size", "size": 10**n, "name": "m"} for n in (1, 2)]
    for text in (generate.report([head, tokens], 80), scale.report([head, *points], 80)):
        assert max(map(len, text.splitlines())) <= 80


def test_figures_taken_apart_are_put_together(tmp_path: Path) -> None:
    ours = written(tmp_path / "a.jsonl", [HEAD, line("streamload stream", 0.4)])
    theirs = written(tmp_path / "b.jsonl", [HEAD, line("x", 0.8), line("x", 1.0)])
    lines = read_lines([ours, theirs])
    assert [x["kind"] for x in lines] == ["run", "load", "load", "load"]
    assert lines[0]["rounds"] == 2
    code, text = said("report", ours, theirs, "--plot")
    assert code == 0, text
    assert "streamload stream" in text
    assert (tmp_path / "a-over-time.png").exists()
    code, text = said("report", ours, "--plot", "--theme", "dark", "--to", str(tmp_path / "c"))
    assert (tmp_path / "c-time-memory-dark.png").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{**HEAD, "dtype": "float16"}, line("x", 1.0)], "dtype"),
        ([{**HEAD, "machine": {**HEAD["machine"], "cpus": 9}}, line("x", 1.0)], "cpus"),
        ([line("x", 1.0)], "line 1"),
        ([HEAD, ["x"]], "line 2"),
        ([], "empty"),
    ],
)
def test_figures_of_something_else_are_refused(tmp_path: Path, lines: list[Any], told: str) -> None:
    good, bad = written(tmp_path / "a.jsonl", LINES), written(tmp_path / "b.jsonl", lines)
    code, text = said("report", good, bad)
    assert code == 1
    assert "b.jsonl" in text
    assert told in text


def test_no_picture_of_nothing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", CASES["all failed"])
    code, text = said("report", path, "--plot")
    assert code == 0
    assert "nothing was measured" in text
    assert not list(tmp_path.glob("*.png"))


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("matplotlib", "bench.report.pl"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(bench.report, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = said("compare", "--path", tiny, "--peers", "floor_read", "--plot")
    assert code == 1
    assert "streamload[plot]" in text
    assert not list(tmp_path.glob("*.jsonl"))


def test_folders_for_results_are_made(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", LINES)
    (tmp_path / "file").write_text("")
    code, text = said("report", path, "--plot", "--to", str(tmp_path / "new" / "x"))
    assert code == 0, text
    assert (tmp_path / "new" / "x-over-time.png").exists()
    code, text = said("report", path, "--html", str(tmp_path / "file" / "page.html"))
    assert code == 1
    assert str(tmp_path / "file") in text
