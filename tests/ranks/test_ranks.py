"""Ranks that load one module together, as processes of their own that talk by gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.scenarios import DTYPES, EXPORTS, LAYOUTS, TIMEOUT_S

pytest.importorskip("torch.distributed")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of every scenario, of one run: torch is imported once and then forked."""
    folder = tmp_path_factory.mktemp("ranks")
    order = [sys.executable, "-m", "tests.ranks.scenarios", str(folder)]
    done = subprocess.run(order, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    made["stderr"] = done.stderr
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("world", "how"), [(w, how) for w, some in LAYOUTS.items() for how in some]
)
@pytest.mark.parametrize("model", ["gpt2", "llama", "hf-llama", "hf-qwen3-moe", "bag"])
def test_every_part_is_bit_equal_to_that_of_a_whole_load(found, model, world, how, dtype):
    if (model, how) == ("bag", "fsdp+tp"):
        pytest.skip("its odd sizes have no one reading there")
    results = found[f"bits{world}"]
    assert isinstance(results["0"], list), results["0"]
    kind = {"model": model, "how": how, "dtype": dtype}
    for rank in map(str, range(world)):
        (one,) = [r for r in results[rank] if kind.items() <= r.items()]
        assert not one["differences"], rank
        assert not one["on_meta"], rank
        assert one["sharded"] > 0
        assert one["ranks"][int(rank)] == one["read"]
        told = [n for n in one["notices"] if n.startswith("held whole, read by each rank")]
        assert bool(told) == (model == "bag" or how == "tp"), one["notices"]
        if model.endswith("llama") and how == "tp":
            assert f": {one['whole']} tensors (" in told[0]
        if how == "fsdp" and model != "bag":
            stored = {"llama": 2}.get(model, 4)  # bytes of an element
            assert one["unwanted"] == 0
            assert one["read"] == one["held_in_f32"] * stored // 4
            assert one["read"] <= 1.05 * one["whole_in_f32"] * stored / 4 / world + 1024


def words(outcome: dict[str, Any], ranks: str = "02") -> list[str]:
    assert all(isinstance(outcome[r], dict) and "error" in outcome[r] for r in ranks), outcome
    return [outcome[r]["error"] for r in ranks]


@pytest.mark.parametrize(
    ("name", "own", "text"),
    [
        ("other_values", "RankError", "rank 1 has other files than ranks 0, 2"),
        ("other_options", "RankError", "rank 1 was called with other options than ranks 0, 2"),
        ("other_names", "PlanError", "rank 1 failed: PlanError: "),
        ("no_file", "CheckpointNotFoundError", "no such file or folder"),
        ("memory_error", "MemoryError", "rank 1 failed: MemoryError: cannot allocate 12 GiB"),
        ("at_commit", "ValueError", "rank 1 failed: ValueError: not this one"),
        ("wrong_option", "ValueError", "timeout_s must be more than 0"),
        ("interrupted", "KeyboardInterrupt", "rank 1 failed: KeyboardInterrupt"),
    ],
)
def test_what_one_rank_does_ends_all_at_once_and_is_named(found, name, own, text):
    outcome = found[name]
    for error in words(outcome):
        assert text in error
        assert "rank 1" in error
        assert "[untouched: True]" in error
    assert outcome["1"]["type"] == own
    assert "[untouched: True]" in outcome["1"]["error"]
    for rank in "02":
        assert (outcome[rank]["type"], outcome[rank]["ranks"]) == ("RankError", [1])


@pytest.mark.parametrize(("name", "gone"), [("killed", 1), ("absent", 1), ("tcp_host_killed", 0)])
def test_a_rank_that_is_gone_is_named_within_the_timeout(found, name, gone):
    others = "".join(str(rank) for rank in range(3) if rank != gone)
    outcome = found[name]
    for error in words(outcome, others):
        assert f"rank {gone}" in error
        assert "[untouched: True]" in error
    for rank in others:
        assert (outcome[rank]["type"], outcome[rank]["ranks"]) == ("RankError", [gone])
        assert outcome[rank]["elapsed_s"] < TIMEOUT_S + 8  # a busy machine's own time included


def test_memory_is_checked_per_host_over_its_ranks(found):
    for rank in "012":
        error = found["out_of_memory"][rank]
        assert error["type"] == "MemoryBudgetError"
        assert "rank 1 on " in error["error"]
        error = found["together_too_large"][rank]
        assert error["type"] == "MemoryBudgetError"
        assert "ranks 0, 1, 2 on " in error["error"]
        assert "[untouched: True]" in error["error"]


def test_a_rank_that_is_slow_but_at_work_is_waited_for(found):
    assert all("read" in found["slow"][rank] for rank in "012"), found["slow"]
    assert found["slow"]["0"]["elapsed_s"] > 1.5, "slower than the timeout of 1 s"


def test_a_placement_that_cannot_be_cut_is_refused_by_name_on_every_rank(found):
    for rank in "012":
        assert found["partial"][rank]["type"] == "PlanError"
        assert "'rows'" in found["partial"][rank]["error"]
        assert "Partial" in found["partial"][rank]["error"]


def test_parts_that_hold_data_are_overwritten_where_they_are(found):
    for rank in "012":
        assert found["in_place"][rank]["same"]
        assert not found["in_place"][rank]["differences"]


@pytest.mark.parametrize("how", LAYOUTS[2])
@pytest.mark.parametrize("kind", ["gguf", "pieces", "fp8", "adapter", "mapped", "auto"])
def test_whatever_is_stored_is_cut_into_parts(found, kind, how):
    for rank in "01":
        assert found["kinds"][rank][f"{kind} {how}"] == {"differences": [], "ranks": 2}


def test_after_a_failed_load_the_next_one_holds(found):
    assert all("read" in found["again"][rank] for rank in "012"), found["again"]


def test_a_sharded_module_computes_and_trains(found):
    for rank in "012":
        assert found["trains"][rank]["gap"] < 1e-5
        assert found["trains"][rank]["all_have_gradients"]


def test_the_report_has_every_rank_and_all_of_them(found):
    texts = [found["fine"][rank]["text"].splitlines() for rank in "012"]
    for lines in texts:
        assert [line.split(":")[0] for line in lines[-4:]] == [
            "rank 0",
            "rank 1",
            "rank 2",
            "3 ranks",
        ]
    assert texts[0][-4:] == texts[1][-4:] == texts[2][-4:]


@pytest.mark.parametrize(("model", "how"), EXPORTS)
def test_an_export_of_four_ranks_is_bit_equal_loaded_by_one_and_by_two(found, model, how):
    assert found["exported"]["0"][f"{model} {how}"] == []
    for rank in "0123":
        (files, nbytes), *more = [e[2:] for e in found["export"][rank] if e[:2] == [model, how]]
        assert not more
        assert (files, nbytes) == tuple(found["export"]["0"][EXPORTS.index((model, how))][2:])
        assert files > 1 or model == "bag"
    for rank in "01":
        results = found["export_again"][rank]
        assert all(not r["differences"] for r in results if r["model"] == model)


def test_an_export_is_cast_and_writes_every_element_once(found):
    assert found["exported"]["0"]["cast"] == []
    written = {(name, how): nbytes for name, how, _, nbytes in found["export"]["0"]}
    assert written["gpt2", "fsdp"] == written["gpt2", "fsdp+tp"]
    assert written["hf-qwen3-moe", "tp"] == written["hf-qwen3-moe", "fsdp+tp"]


def test_a_broken_export_leaves_what_was_there(found):
    for rank in "02":
        assert found["export_broken"][rank]["type"] == "RankError"
        assert "rank 1" in found["export_broken"][rank]["error"]
    assert found["export_broken_files"] == ["old.txt"]


@pytest.mark.parametrize("config", ["{'tp_size': 2}", "{'fsdp_size': 2}"])
@pytest.mark.parametrize("model", ["hf-llama", "hf-qwen3", "hf-qwen3-moe"])
def test_transformers_own_layouts_are_loaded_and_compute(found, model, config):
    for rank in "01":
        one = found["distributed"][rank][f"{model} {config}"]
        assert not one["differences"]
        assert one["sharded"] > 0
        assert one["ranks"] == 2
        assert one["names"] == 0, "ties are kept"
        assert one["gap"] < 1e-5
