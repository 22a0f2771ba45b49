"""``streamload bench``."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from streamload.measuring import modes, page_cache, rounds

MODES = ["stream", "stored", "map"]


def test_measures_the_floor_and_every_mode(run, tiny):
    result = run("bench", tiny, "--dtype", "bfloat16", "--rounds", 1, "--cold", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert list(found["modes"]) == MODES
    assert list(found["floor"]) == ["read", "read + cast"]
    assert found["read_bytes"] == 531_456 - 2 * 64 * 64 * 4
    assert len(found["measurements"]) == 6
    floor_s = found["floor"]["read + cast"]["total_s"]
    for row in found["modes"].values():
        assert row["ok"]
        assert row["total_s"] == pytest.approx(row["load_s"] + row["first_use_s"])
        assert row["floor"] == "read + cast"
        assert row["floor_reached"] == pytest.approx(floor_s / row["total_s"])
        assert row["held_back_by"] in ("disk", "memory bandwidth", "cpu", "none")
        assert row["evidence"]
    assert found["cache"]["asked"] == "cold"
    if sys.platform == "linux" and found["cache"]["worked"]:
        assert found["cache"]["resident_before"][1] < 0.01
    assert any("small checkpoint" in note for note in found["notes"])


class Watched:
    """What a watched process told."""

    def __init__(self, load_s, *, failure=None, other_cpus=0.0, **used):
        self.failure = failure
        self.other_cpus = other_cpus
        self.stolen_cpus = 0.0
        self.peaks = {"peak_rss_bytes": 1 << 20, "peak_anonymous_bytes": 0, "peak_file_bytes": 0}
        common = {"first_use_s": 0.0, "touched_bytes": 0, "copy_bytes_per_s": 1e10}
        common |= {"written_bytes": 1, "user_s": load_s, "system_s": 0.0, "storage_bytes": 0}
        self._used = {"event": "used", "load_s": load_s, **common, **used}

    def figures(self):
        disturbed = {"other_cpus": self.other_cpus, "stolen_cpus": self.stolen_cpus}
        return {**self.peaks, **disturbed, "trace": []}

    def event(self, name):
        return self._used if name == "used" and self.failure is None else {}


@pytest.fixture
def planted(monkeypatch):
    """Measurements that are answers of a function of the order; None: a process after all."""

    def plant(answer):
        orders, measured = [], rounds.watch_process

        def watch(arguments, **_):
            order = json.loads(arguments[-1])
            what = order["peer"].rpartition(":")[2].removeprefix("streamload_")
            orders.append({**order["job"], "do": what})
            given = answer(orders[-1], len(orders))
            return measured(arguments, **_) if given is None else given

        monkeypatch.setattr(rounds, "watch_process", watch)
        return orders

    return plant


SECONDS = {"copy": 1.0, "floor_read": 1.0, "floor_cast": 2.0, "stream": 4.0, "stored": 2.5}


def test_medians_and_fractions_are_of_all_rounds(run, tiny, planted):
    def answer(order, count):
        if order["do"] == "map":
            return Watched(0.25, first_use_s=0.75, written_bytes=0)
        return Watched(SECONDS[order["do"]] + (10.0 if count <= 6 else 0.0))

    orders = planted(answer)
    found = json.loads(run("bench", tiny, "--workers", 2, "--json").stdout)
    assert [o["do"] for o in orders[:6]] == ["copy", "floor_read", "floor_cast", *MODES]
    assert [o["do"] for o in orders[6:12]] != [o["do"] for o in orders[:6]], "turns change"
    modes = found["modes"]
    assert modes["stream"]["total_s"] == 4.0
    assert modes["stream"]["total_range_s"] == [4.0, 14.0]
    assert modes["stream"]["floor_reached"] == 0.5
    assert modes["stored"]["floor_reached"] == 0.8
    assert (modes["map"]["floor"], modes["map"]["floor_reached"]) == ("read", 1.0)
    assert found["rounds"] == 3


def test_the_table_says_what_held_back_and_what_disturbed(run, tiny, planted, monkeypatch):
    monkeypatch.setattr(modes, "usable_cpus", lambda: 2)
    monkeypatch.setattr(page_cache, "drop", lambda files: "73% of the pages stayed")
    planted(lambda order, _: Watched(2.0, other_cpus=1.5, user_s=1.0))
    out = run("bench", tiny, "--cold", "--rounds", 1).stdout
    assert "page cache NOT cold" in out
    assert "Note: The page cache could not be dropped: 73% of the pages stayed." in out
    assert "other processes used up to 1.5 of 2 CPUs" in out
    assert "stream: cpu: it kept 0.5 of 2 CPUs busy" in out
    assert "100% of read + cast" in out


def test_a_file_larger_than_the_cache_is_not_called_warm(run, tiny, planted, monkeypatch):
    monkeypatch.setattr(page_cache, "resident_fraction", lambda files: 0.4)
    planted(lambda order, _: Watched(1.0))
    out = run("bench", tiny, "--rounds", 1).stdout
    assert "page cache NOT warm" in out
    assert "Only 40% of the files stayed in the page cache" in out


def test_a_failure_costs_its_own_row(run, tiny, planted):
    reason = "MemoryBudgetError: too large"

    def answer(order, _):
        failed = order["do"] in ("floor_cast", "stream")
        return Watched(1.0, failure=reason if failed else None)

    planted(answer)
    result = run("bench", tiny, "--rounds", 1)
    assert result.exit_code == 0
    assert f"stream failed: {reason}" in result.stdout
    assert f"read + cast failed: {reason}" in result.stdout
    planted(lambda order, _: Watched(1.0, failure=reason))
    result = run("bench", tiny, "--rounds", 1, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_tensors_alone_are_measured_where_there_is_no_model(run, tmp_path, planted):
    orders = planted(lambda order, _: None if order["do"] == "stream" else Watched(1.0))
    save_file({"x": torch.randn(100, 7), "y": torch.ones(5).long()}, tmp_path / "a.safetensors")
    found = json.loads(run("bench", tmp_path, "--rounds", 1, "--json").stdout)
    assert found["ok"], found
    assert all(order["tensors"] for order in orders)
    touched = {t["what"]: t["touched_bytes"] for t in found["measurements"]}
    assert touched["stream"] == 2840
    assert any(note.startswith("Tensors alone were loaded") for note in found["notes"])


def test_nothing_is_measured_of_what_cannot_be_loaded(run, tiny, tmp_path, planted):
    orders = planted(lambda order, _: Watched(1.0))
    result = run("bench", tmp_path / "nothing")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert run("bench", tiny, "--rounds", 0).exit_code == 2
    shutil.copy(f"{tiny}/config.json", tmp_path)
    save_file({"wte.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    result = run("bench", tmp_path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["missing"]
    assert orders == []


def test_a_map_row_that_mapped_nothing_is_said():
    def medians(written):
        return {
            "stream": {"ok": True, "written_bytes": 100},
            "map": {"ok": True, "written_bytes": written},
        }

    assert "nothing could be mapped" in modes._unmapped(medians(100))[0]
    assert modes._unmapped(medians(60)) == []
    assert modes._unmapped(medians(0)) == []
    assert modes._unmapped(medians(None)) == []
