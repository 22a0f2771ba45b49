"""The harness itself: planted peers, outside measurements, and what is printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import streamload
from bench import checkpoints
from bench.compare import compare, job_for
from bench.job import Job, find_peers
from bench.report import tables
from bench.report.figures import write_lines
from bench.report.rows import rows_of, warnings_of
from bench.safetensors_header import read_headers
from streamload.measuring import page_cache
from streamload.measuring.peers import read_peer
from streamload.measuring.rounds import measure_load, run_child
from streamload.system.peaks import PeakSampler, StatusReader

MIB = 1 << 20
ROOT = str(Path(__file__).resolve().parents[2])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures through /proc")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_DIR", str(folder))
        return checkpoints.checkpoint("gpt2-tiny")


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_DIR", str(tmp_path))
    return tmp_path


def plant(folder: Path, name: str, load: str, **names: object) -> str:
    path = folder / f"{name}.py"
    heads = {"LABEL": f"planted {name}", "DELIVERS": "tensors", **names}
    lines = [f"{key} = {value!r}" for key, value in heads.items()]
    body = "\n".join(f"    {line}" for line in load.splitlines())
    path.write_text("\n".join([*lines, "", "def load(job):", body, ""]))
    return str(path)


RIGHT = """\
from safetensors.torch import load_file
found = {n: job.cast(t) for n, t in load_file(job.files[0]).items()}
"""
WRONG = {
    "one_value": RIGHT + "found['h.1.mlp.c_proj.weight'][-1, -1] += 1\nreturn found",
    "missing": RIGHT + "del found['ln_f.bias']\nreturn found",
    "dtype": RIGHT + "found['wpe.weight'] = found['wpe.weight'].double()\nreturn found",
    "turned": RIGHT + "k = 'h.0.attn.c_proj.weight'\nfound[k] = found[k].t()\nreturn found",
    "nan": RIGHT + "found['wte.weight'][0, 0] = float('nan')\nreturn found",
}


def checked(tiny: str, load: str) -> str:
    """What the check says of a planted load, without a process of its own."""
    from bench.values import check

    scope: dict[str, Any] = {}
    exec("def load(job):\n" + "\n".join(f"    {x}" for x in load.splitlines()), scope)
    job = Job(tiny, "bfloat16", 1, "")
    return check(scope["load"](job), job)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("one_value", "wrong: h.1.mlp.c_proj.weight"),
        ("missing", "wrong: no ln_f.bias"),
        ("dtype", "wrong: dtype of wpe.weight"),
        ("turned", "wrong: h.0.attn.c_proj.weight"),
        ("nan", "wrong: wte.weight"),
    ],
)
def test_wrong_values_are_named(tiny: str, kind: str, named: str) -> None:
    assert checked(tiny, WRONG[kind]) == named


def test_right_values_are_right(tiny: str) -> None:
    assert checked(tiny, RIGHT + "return found") == "right"


def test_large_files_are_sampled_at_both_ends(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import values

    monkeypatch.setattr(values, "FULL_BYTES", 0)
    monkeypatch.setattr(values, "SAMPLE_ELEMENTS", 64)
    assert checked(tiny, RIGHT + "return found") == "right"
    strided = RIGHT + "found = {n: t.t().contiguous().t() if t.dim() == 2 else t"
    assert checked(tiny, strided + " for n, t in found.items()}\nreturn found") == "right"
    for place in ("0, 0", "-1, -1"):
        wrong = RIGHT + f"found['wte.weight'][{place}] += 1\nreturn found"
        assert checked(tiny, wrong) == "wrong: wte.weight"


def test_each_failure_costs_only_its_own_row(tiny: str, tmp_path: Path) -> None:
    plant(tmp_path, "a_wrong", WRONG["one_value"])
    plant(tmp_path, "b_raises", "raise ValueError('cannot read | this')")
    plant(tmp_path, "c_dies", f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})")
    plant(tmp_path, "d_absent", "return {}", IMPORTS=("no_such_package",))
    plant(tmp_path, "e_prints", "print('noise')\n" + RIGHT + "return found")
    names = ["a_wrong", "b_raises", "c_dies", "d_absent", "e_prints", "floor_read"]
    peers = find_peers(names, folders=[str(tmp_path)])
    path = tmp_path / "out" / "lines.jsonl"
    lines = write_lines(compare(tiny, peers, dtype="bfloat16", workers=2, rounds=1), str(path))

    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    head = lines[0]
    assert head["versions"]["torch"]
    assert {"cpu", "cpus", "commit", "filesystem"} <= head["machine"].keys()

    said = {row.label: row.reason or row.values for row in rows_of(lines)}
    assert said == {
        "floor: read": "none kept",
        "planted a_wrong": "wrong: h.1.mlp.c_proj.weight",
        "planted b_raises": "ValueError: cannot read | this",
        "planted c_dies": "killed: out of memory",
        "planted d_absent": "no_such_package is not installed",
        "planted e_prints": "right",
    }
    assert rows_of(lines)[0].label == "floor: read"

    text = tables.report(lines)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(names)
    assert len({len(line) for line in table}) == 1
    assert {line.count("|") for line in table} == {len(tables.COLUMNS) + 1}
    assert "wrong: h.1.mlp.c_proj.weight" in text


def test_rounds_are_interleaved_and_each_row_has_their_median(tiny: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        plant(tmp_path, name, "import torch\nreturn {'x': torch.zeros(3)}")
    peers = find_peers(["first", "second"], folders=[str(tmp_path)])
    lines = list(compare(tiny, peers, dtype=None, workers=1, rounds=2, cold=True))
    assert [line["peer"] for line in lines[1:]] == ["first", "second", "second", "first"]
    assert [line["round"] for line in lines[1:]] == [1, 1, 2, 2]
    for line in lines[1:]:
        assert line["cache"] == "cold (fadvise)"
        assert line["resident_before"] < 0.01
    row = next(row for row in rows_of(lines) if row.label == "planted first")
    totals = [line["total_s"] for line in lines[1:] if line["peer"] == "first"]
    assert row.median is not None
    assert row.median["total_s"] == pytest.approx(sum(totals) / 2)
    assert row.total_range_s == (min(totals), max(totals))


KEEP = """\
import re, torch
kept = {'x': torch.ones(192 << 20, dtype=torch.uint8)}
pages = open('/proc/self/smaps_rollup').read()
open(job.own_dir, 'w').write(str(int(re.search('Rss: *([0-9]+)', pages)[1]) << 10))
return kept
"""


def test_peak_and_times_agree_with_other_measurements(tiny: str, tmp_path: Path) -> None:
    # The other one counts the child's pages. (Not getrusage: its maximum includes what the parent
    # held when it forked.)
    peer = read_peer(plant(tmp_path, "keeps", "import time\ntime.sleep(0.3)\n" + KEEP))
    other = tmp_path / "other"
    start_s = time.perf_counter()
    found = measure_load(peer, Job(tiny, None, 1, str(other)))
    around_s = time.perf_counter() - start_s
    assert found["ok"], found["reason"]
    assert found["values"].startswith("wrong: no ")
    peak = found["start_rss_bytes"] + found["peak_rss_bytes"]
    assert peak == pytest.approx(int(other.read_text()), rel=0.02)
    assert found["peak_anonymous_bytes"] == pytest.approx(192 * MIB, rel=0.02)
    assert found["load_s"] >= 0.3
    # The trace is of the load and of nothing before it, by another process's clock.
    assert found["total_s"] <= found["trace"][-1][0] + 1e-4
    assert found["trace"][-1][0] < around_s - found["import_s"]
    assert max(point[2] for point in found["trace"]) == pytest.approx(192 * MIB, rel=0.05)
    if found["peak_cgroup_bytes"] is not None:
        assert found["peak_cgroup_bytes"] == pytest.approx(192 * MIB, rel=0.05)


def test_a_load_above_the_limit_is_a_row_that_says_so(tiny: str, tmp_path: Path) -> None:
    load = "import torch\nreturn {'x': torch.ones(1 << 30, dtype=torch.uint8)}"
    peer = read_peer(plant(tmp_path, "large", load))
    found = measure_load(peer, Job(tiny, None, 1, ""), limit_bytes=512 * MIB)
    assert not found["ok"]
    assert found["reason"] == "killed: out of memory (limit)" or found["reason"].startswith(
        "no memory limit: "
    )


def test_a_load_without_end_is_ended(tiny: str, tmp_path: Path) -> None:
    peer = read_peer(plant(tmp_path, "hangs", "import time\ntime.sleep(60)"))
    found = measure_load(peer, Job(tiny, None, 1, ""), timeout_s=3)
    assert found["reason"] == "took longer than 3 s"


def test_unknown_peer_and_incomplete_peer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no peer 'nobody'"):
        find_peers(["nobody"])
    (tmp_path / "bare.py").write_text("LABEL = 'x'\n")
    with pytest.raises(AttributeError, match="does not define DELIVERS"):
        read_peer(str(tmp_path / "bare.py"))


def test_what_reads_published_names_alone_is_not_asked_for_others(
    tiny: str, tmp_path: Path
) -> None:
    local = str(tmp_path / "local")
    streamload.convert(tiny, local, names="local")
    picky = read_peer(plant(tmp_path, "picky", "return {}", PUBLISHED=True))
    plain = read_peer(plant(tmp_path, "plain", "return {}"))
    assert Job(local, None, 1).reason_against(picky) == "cannot read these names"
    assert Job(local, None, 1).reason_against(plain) is None
    assert Job(tiny, None, 1).reason_against(picky) is None
    assert {peer.name for peer in find_peers() if peer.published} == {"accelerate", "transformers"}
    _, line = compare(local, [picky], dtype=None, workers=1, rounds=1)
    assert (line["ok"], line["reason"]) == (False, "cannot read these names")


def test_every_peer_can_be_read_without_its_packages() -> None:
    code = (
        "import sys; from bench.job import find_peers\n"
        "print(len(find_peers()), [n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    count, loaded = run.stdout.split(maxsplit=1)
    assert int(count) >= 16
    assert loaded.strip() == "[]"


def test_notes_tell_of_a_busy_machine_and_of_a_cache_that_stayed() -> None:
    head = {"kind": "run", "machine": {"cpus": 2}}
    line = {"kind": "load", "ok": True, "other_cpus": 1.5, "stolen_cpus": 0.2}
    stayed = page_cache.drop.__doc__ and "73% of the pages stayed"
    notes = " ".join(warnings_of([head, line | {"cache_problem": stayed}]))
    assert "73% of the pages stayed" in notes
    assert "1.5 of 2 CPUs" in notes
    assert "steal" in notes
    assert warnings_of([head, line | {"other_cpus": 0.1, "stolen_cpus": 0.0}]) == []


def test_dropped_pages_are_gone_and_warm_ones_are_there(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with open(path, "wb") as file:
        file.write(os.urandom(4 * MIB))
    if (why := page_cache.drop([path])) is not None:
        pytest.skip(why)
    assert page_cache.resident_fraction([path]) == 0
    page_cache.warm([path])
    assert page_cache.resident_fraction([path]) == 1


def test_the_made_checkpoint_is_what_transformers_publishes(tiny: str) -> None:
    from safetensors import safe_open

    entries = read_headers([os.path.join(tiny, "model.safetensors")])
    with safe_open(os.path.join(tiny, "model.safetensors"), framework="pt") as file:
        assert set(file.keys()) == set(entries)
        assert file.get_tensor("h.1.attn.bias").tolist()[0][0][0] == [1.0] + [0.0] * 63
        assert file.get_tensor("h.0.attn.c_attn.weight").shape == (64, 192)
        assert 0.01 < float(file.get_tensor("wte.weight").std()) < 0.03


def test_a_child_that_breaks_leaves_no_group_behind(tiny: str) -> None:
    watch = run_child({"do": "nothing"}, limit_bytes=None, timeout_s=30)
    assert watch.failure == "KeyError: 'nothing'"


def test_watching_costs_one_system_call_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("open", "pread", "read", "close", "stat", "listdir"):
        real = getattr(os, name)

        def counted(*args: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more)

        monkeypatch.setattr(os, name, counted)
    with StatusReader(os.getpid()) as status:
        opened = calls.copy()
        for _ in range(20):
            assert status.read().rss > 0
    assert opened == ["open"]
    assert calls == ["open", *["pread"] * 20, "close"]


def test_copies_in_other_formats_are_made_anew_for_changed_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    peer = find_peers(["torch_load"])[0]
    seen = set()
    for size in (10, 20):
        path.write_bytes(b"x" * size)
        seen.add(job_for(peer, str(path), None, 1).own_dir)
    assert len(seen) == 2


def test_first_use_takes_no_memory_of_its_own() -> None:
    import torch

    from streamload.measuring.first_use import use_tensors

    plain = torch.ones(2048, 8192)
    kinds = [plain, plain.t(), plain.bfloat16(), plain.bool(), torch.ones(3), torch.ones(())]
    kinds += [torch.ones(5, 0), torch.ones(4 * MIB, dtype=torch.int64), torch.ones(2, 3, 4).half()]
    kinds += [torch.ones(64).to(torch.float8_e4m3fn), torch.ones(1, 2048, 2048)]
    use_tensors([torch.ones(2)], workers=2)
    with PeakSampler(interval_s=0.001) as sampler:
        nbytes = use_tensors(kinds, workers=2)
    assert nbytes == sum(tensor.numel() * tensor.element_size() for tensor in kinds)
    assert sampler.peaks.rss_bytes < 8 * MIB
