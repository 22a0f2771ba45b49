"""Fits and reports of the other two commands, from planted figures and one tiny run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import checkpoints, generate, scale
from bench.__main__ import main
from bench.job import find_peers
from bench.safetensors_header import read_headers

MACHINE = {
    "cpu": "x", "cpus": 2, "memory_bytes": None, "system": "Linux", "filesystem": "ext4",
    "python": "3.11", "commit": None,
}  # fmt: skip
HEAD: dict[str, Any] = {
    "kind": "run", "path": "p", "dtype": None, "workers": 1, "rounds": 1, "started": "now",
    "versions": {}, "machine": MACHINE, "tokens": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_a_power_is_found(power: float) -> None:
    points = [(10.0**n, 3 * 10 ** (n * power), 0.0) for n in range(1, 6)]
    assert scale.exponent(points, 1) == pytest.approx(power)


def test_exponent_needs_two_sizes() -> None:
    assert scale.exponent([(10, 1, 1)], 1) is None
    assert scale.exponent([(10, 1, 1), (10, 2, 1)], 1) is None
    assert scale.exponent([(10, 0, 1), (100, 2, 1)], 1) is None


def test_report_of_scale_takes_the_fastest_round_and_names_failures() -> None:
    def line(size: int, total_s: float, **more: Any) -> dict[str, Any]:
        return {
            "kind": "tensors", "label": "a", "size": size, "name": f"{size} tensors", "ok": True,
            "reason": None, "total_s": total_s, "peak_rss_bytes": size * 1000,
            "other_cpus": 0.0, "stolen_cpus": 0.0, **more,
        }  # fmt: skip

    lines = [HEAD, line(100, 0.1), line(100, 9.0), line(1000, 1.0)]
    lines.append(line(100, 0.0, label="b", ok=False, reason="it broke"))
    text = scale.report(lines)
    assert "a: time grows with the power 1.00 of tensors, memory with the power 1.00" in text
    assert "9.0" not in text.split("Python")[1]
    assert "Failed: b: it broke" in text


def test_report_of_generate_compares_tokens_within_a_dtype() -> None:
    def line(label: str, dtype: str, tokens: list[int], **more: Any) -> dict[str, Any]:
        return {
            "kind": "tokens", "label": label, "dtype": dtype, "ok": True, "reason": None,
            "tokens": tokens, "first_token_s": 2.0, "last_token_s": 3.0, "other_cpus": 0.0,
            "peak_rss_bytes": 5 << 20, "stolen_cpus": 0.0, **more,
        }  # fmt: skip

    lines = [
        HEAD,
        line("a", "float32", [1, 2, 3]),
        line("b", "float32", [1, 2, 4]),
        line("a", "bfloat16", [7, 7, 7]),
        line("b", "bfloat16", [], ok=False, reason="it broke"),
    ]
    rows = [row for row in generate.report(lines).splitlines() if row.startswith("| ")][2:]
    cells = {tuple(c.strip() for c in row.split("|")[1:3]): row for row in rows}
    assert "3 of 3" in cells[("a", "float32")]
    assert "2 of 3" in cells[("b", "float32")]
    assert "3 of 3" in cells[("a", "bfloat16")]
    assert "it broke" in cells[("b", "bfloat16")]


def test_many_tensors_and_holes_are_as_described(tmp_path: Path) -> None:
    entries = read_headers([checkpoints.many_tensors(100)])
    assert len(entries) == 100
    assert {entry.shape for entry in entries.values()} == {(64,)}

    folder = checkpoints.with_holes()
    found = os.stat(os.path.join(folder, "model.safetensors"))
    assert 19e9 < found.st_size / 4 < 21e9
    if hasattr(found, "st_blocks"):
        assert found.st_blocks * 512 < 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")
def test_commands_run_from_start_to_end(results: Path) -> None:
    run = CliRunner().invoke(
        main,
        ["compare", "--model", "gpt2-tiny", "--rounds", "1", "--dtype", "stored", "--peers",
         "floor_cast, streamload_stream,streamload_map", "--plot",
         "--html", str(results / "page.html")],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    table = [row for row in run.output.splitlines() if row.startswith("| ")][2:]
    assert len(table) == 3
    assert all("| right" in row for row in table)
    assert (results / "page.html").stat().st_size > 10_000
    assert len(list(results.glob("compare-*.png"))) == 2
    (raw,) = results.glob("compare-*.jsonl")
    kinds = [json.loads(row)["kind"] for row in raw.read_text().splitlines()]
    assert kinds == ["run", "load", "load", "load"]


@pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")
def test_generate_runs_from_start_to_end() -> None:
    path = checkpoints.checkpoint("gpt2-tiny")
    peers = find_peers(["streamload"], kind="generators")
    lines = list(
        generate.generate(path, ["float32"], peers, count=3, rounds=1, workers=1, vocabulary=320)
    )
    (line,) = lines[1:]
    assert line["ok"], line["reason"]
    assert len(line["tokens"]) == 3
    assert 0 < line["first_token_s"] < line["last_token_s"]
    # All of the process counts here, the libraries too.
    assert line["peak_rss_bytes"] > 100 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")
def test_times_to_tokens_are_from_the_start_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(0.2)\nLABEL, DELIVERS, IMPORTS = 'slow', 'tokens', ()\n"
        "def load(job):\n    pass\n"
        "def tokens(job, ids, count):\n"
        "    yield 1\n    time.sleep(0.2)\n    yield 2\n"
    )
    peers = find_peers(["slow"], kind="generators", folders=[str(tmp_path)])
    path = checkpoints.checkpoint("gpt2-tiny")
    _, line = generate.generate(path, [None], peers, count=2, rounds=1, workers=1, vocabulary=320)
    assert line["ok"], line["reason"]
    assert line["tokens"] == [1, 2]
    assert line["first_token_s"] > 0.2
    assert line["last_token_s"] > 0.4


def test_unknown_names_are_wrong_usage() -> None:
    for words in (["--model", "gpt5"], ["--model", "gpt2-tiny", "--peers", "nobody"]):
        run = CliRunner().invoke(main, ["compare", *words])
        assert run.exit_code == 2, run.output
