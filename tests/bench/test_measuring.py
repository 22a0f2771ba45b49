"""The floor, the verdict, the page cache and the survey, apart from any command."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamload.core.errors import CheckpointError, PlanError
from streamload.measuring import floor, machine, page_cache
from streamload.measuring.survey import survey
from streamload.measuring.verdict import Figures, judge
from streamload.measuring.watch import watch_process
from streamload.synthesis import synthesize
from streamload.system import filesystems

MIB = 1 << 20
# Two workers on two CPUs, a GB read, warm: one second, all of it computed.
WARM = Figures(
    total_s=1.0, user_s=1.2, system_s=0.7, read_bytes=10**9, storage_bytes=0,
    moved_bytes=2 * 10**9, floor_read_s=0.4, copy_bytes_per_s=2e10, workers=2, cpus=2,
    other_cpus=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return synthesize("gpt2-tiny", tmp_path_factory.mktemp("measuring") / "gpt2-tiny").path


@pytest.mark.parametrize(
    ("changes", "resource", "words"),
    [
        ({}, "cpu", ("1.9 of 2 CPUs", "63 % in code of its own", "37 % in the system", "10 %")),
        (
            {"storage_bytes": 1_050_000_000, "user_s": 0.5, "system_s": 0.3},
            "disk",
            ("100 % of 953.7 MiB came from the disk, at 1001.4 MiB/s", "2.33 GiB/s", "0.8 of 2"),
        ),
        # As fast as reading alone: the disk it was, though the CPUs had no time left.
        ({"storage_bytes": 10**9, "floor_read_s": 0.9}, "disk", ("1.03 GiB/s",)),
        ({"storage_bytes": 10**9, "floor_read_s": 0.3}, "cpu", ()),
        ({"storage_bytes": None}, "cpu", ()),
        ({"copy_bytes_per_s": 3e9}, "memory bandwidth", ("1.86 GiB/s", "2.79 GiB/s")),
        (
            {"user_s": 0.3, "system_s": 0.2, "other_cpus": 1.4, "copy_bytes_per_s": 3e9},
            "cpu",
            ("other processes took 1.4",),
        ),
        ({"user_s": 0.9, "system_s": 0.1}, "cpu", ("one thread's worth",)),
        ({"user_s": 0.2, "system_s": 0.1}, "none", ("0.3 of 2 CPUs", "0 % came from the disk")),
    ],
)
def test_the_verdict_follows_from_the_figures(changes, resource, words):
    verdict = judge(replace(WARM, **changes))
    assert verdict.resource == resource
    for part in words:
        assert part in verdict.evidence


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_floor_has_the_files_values(tmp_path, monkeypatch, dtype, workers):
    monkeypatch.setattr(floor, "BLOCK_BYTES", 4096)
    held = {
        "a": torch.randn(70, 33),
        "b": torch.arange(5000),
        "c": torch.randn(()),
        "d": torch.randn(9, 130).half(),
        "e": torch.empty(0, 4),
        "f": torch.rand(99) > 0.5,
    }
    save_file(held, tmp_path / "x.safetensors")
    found = survey(str(tmp_path / "x.safetensors"))
    threads, running = torch.get_num_threads(), threading.active_count()
    made = floor.read_and_cast(found.pieces, dtype, workers=workers)
    floor.read_only(found.pieces, workers=workers)
    assert torch.get_num_threads() == threads
    assert threading.active_count() == running
    assert made.keys() == held.keys()
    for name, tensor in held.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert made[name].dtype == wanted.dtype
        assert torch.equal(made[name], wanted), name


def test_a_file_that_ends_early_is_no_floor(tmp_path):
    save_file({"a": torch.ones(4096)}, tmp_path / "x.safetensors")
    found = survey(str(tmp_path / "x.safetensors"))
    os.truncate(tmp_path / "x.safetensors", 8192)
    with pytest.raises(EOFError, match="ended early"):
        floor.read_only(found.pieces, workers=2)


def test_the_rate_of_copying_is_of_all_that_moves(monkeypatch):
    times_s = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(floor.time, "thread_time", lambda: next(times_s))
    moved = 2 * 4 * 64 * MIB  # read and written, four times 64 MiB
    assert floor.copy_rate(workers=1) == moved / 0.5
    assert floor.copy_rate(workers=1) == moved / 0.25
    monkeypatch.setattr(floor.time, "thread_time", ticks := Ticks())
    assert floor.copy_rate(workers=2) == 2 * moved / ticks.step_s


class Ticks:
    """A clock for each thread that moves by one step at every look."""

    step_s = 2.0

    def __init__(self):
        self._own = threading.local()

    def __call__(self):
        self._own.now_s = getattr(self._own, "now_s", 0.0) + self.step_s
        return self._own.now_s


def test_the_survey_is_of_what_the_model_needs(tiny):
    stored = load_file(os.path.join(tiny, "model.safetensors"))
    needed = {n: t for n, t in stored.items() if not n.endswith(".attn.bias")}
    found = survey(tiny, dtype="bfloat16")
    assert {piece.name for piece in found.pieces} == needed.keys()
    assert found.read_bytes == sum(t.nbytes for t in needed.values())
    assert floor.bytes_as(found.pieces, torch.bfloat16) == found.read_bytes // 2
    assert found.files == [os.path.join(tiny, "model.safetensors")]
    assert found.why_no_model is None
    assert found.left_out == ()


def test_without_a_model_the_survey_is_of_all_tensors(tmp_path):
    save_file({"x": torch.ones(10), "n": torch.ones(3).long()}, tmp_path / "x.safetensors")
    found = survey(str(tmp_path), dtype="float16")
    assert "no config.json" in found.why_no_model
    assert floor.bytes_as(found.pieces, torch.float16) == 20 + 24
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    assert "never-heard-of" in survey(str(tmp_path)).why_no_model
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        survey(str(tmp_path))


def test_what_does_not_fit_the_model_is_not_measured(tiny, tmp_path):
    stored = load_file(os.path.join(tiny, "model.safetensors"))
    del stored["ln_f.bias"]
    save_file(stored, tmp_path / "model.safetensors")
    with open(os.path.join(tiny, "config.json"), "rb") as file:
        (tmp_path / "config.json").write_bytes(file.read())
    with pytest.raises(PlanError, match="missing"):
        survey(str(tmp_path))


def test_a_cache_that_cannot_be_dropped_is_said(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda paths: 0.25)
    assert "25%" in page_cache.drop([str(tmp_path / "x")])
    monkeypatch.setattr(page_cache, "resident_fraction", lambda paths: None)
    assert "could not verify" in page_cache.drop([str(tmp_path / "x")])
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert "no posix_fadvise" in page_cache.drop([str(tmp_path / "x")])


def test_the_file_system_is_that_of_the_nearest_mount(monkeypatch):
    mounts = [("/", "ext4"), ("/data", "old"), ("/data", "xfs"), ("/data/in", "nfs4"), ("/d", "no")]
    monkeypatch.setattr(filesystems, "_mounts", lambda: mounts)
    monkeypatch.setattr(os.path, "realpath", lambda path: path)
    kinds = {
        path: machine.describe(path)["filesystem"]
        for path in ("/data", "/data/in/x", "/data/inner", "/dat", "/x")
    }
    assert list(kinds.values()) == ["xfs", "nfs4", "xfs", "ext4", "ext4"]
    mounts.clear()
    assert machine.describe("/x")["filesystem"] is None


def test_usage_counts_what_was_computed():
    outer_s, before = time.process_time(), machine.usage()
    inner_s = time.process_time()
    sum(range(2_000_000))
    inner_s = time.process_time() - inner_s
    used = machine.usage_since(before)
    outer_s = time.process_time() - outer_s
    assert inner_s > 0.001
    # Another clock of the same thing, started later and earlier.
    assert 0.9 * inner_s <= used["user_s"] + used["system_s"] <= 1.1 * outer_s


def test_usage_counts_what_came_from_disks(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(os.urandom(4 * MIB))
    why, before = page_cache.drop([str(tmp_path / "x")]), machine.usage()
    (tmp_path / "x").read_bytes()
    used = machine.usage_since(before)
    if why is None and before["storage_bytes"] is not None:
        assert used["storage_bytes"] >= 4 * MIB
    before = {"user_s": 1.0, "system_s": 0.25, "storage_bytes": 200}
    now = {"user_s": 2.5, "system_s": 1.0, "storage_bytes": 700}
    monkeypatch.setattr(machine, "usage", lambda: now)
    assert machine.usage_since(before) == {"user_s": 1.5, "system_s": 0.75, "storage_bytes": 500}
    assert machine.usage_since(before | {"storage_bytes": None})["storage_bytes"] is None
    now["storage_bytes"] = None
    assert machine.usage_since(before)["storage_bytes"] is None


CHILD = """
from streamload.measuring.watch import Channel
channel = Channel()
channel.say(event="ready")
channel.wait()
print("noise of a loader")
held = b"x" * (64 << 20)
channel.say(event="used")
channel.wait()
{end}
"""


@pytest.mark.parametrize(
    ("end", "failure"), [("", None), ("raise ValueError('at the end')", "ValueError: at the end")]
)
def test_a_process_is_watched_from_outside(end, failure):
    watch = watch_process([sys.executable, "-c", CHILD.format(end=end)], timeout_s=30)
    assert watch.failure == failure
    assert [event["event"] for event in watch.events] == ["ready", "used"]
    assert watch.peaks["peak_rss_bytes"] == pytest.approx(64 * MIB, rel=0.1)


def test_a_process_without_end_is_ended():
    watch = watch_process([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert watch.failure == "took longer than 0.5 s"
