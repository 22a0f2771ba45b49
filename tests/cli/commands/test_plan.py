"""``streamload plan``: everything before a byte moves."""

import json
import shutil
from dataclasses import replace

import pytest

import streamload
from streamload.cli.failures import as_options
from streamload.cli.render.advice import slow_notes
from streamload.core.report import LoadedTensor, LoadReport, MemoryReport
from streamload.core.wording import format_bytes
from streamload.loading.budget import ways_out
from streamload.loading.calls import plan_checkpoint
from streamload.synthesis import synthesize


@pytest.fixture
def misfit(tiny, tmp_path):
    """The tiny checkpoint beside a config with another vocabulary and one more block."""
    folder = tmp_path / "misfit"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": 300, "n_layer": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_good_plan(run, tiny):
    result = run("plan", tiny, "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert "missing=0 unexpected=0 shape_mismatch=0" in result.stdout
    assert "\nneeds " in result.stdout
    assert " available (" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["blocks.0…blocks.1", "\N{MULTIPLICATION SIGN}2"] in lines
    row = next(line for line in lines if line[:1] == ["attn.qkv.weight"])
    assert row == [
        *("attn.qkv.weight", "←", "h.N.attn.c_attn.weight", "[192,", "64]"),
        *("float32", "→", "bfloat16", "transpose"),
    ]
    assert "ignored: 2 stored tensors" in result.stdout
    assert "this load would go ahead" in result.stdout


def test_what_is_mapped_is_told(run, tmp_path):
    synthesize("llama-tiny", tmp_path)
    nbytes = sum(tensor.nbytes for tensor in plan_checkpoint(tmp_path).tensors)
    (room,) = (ln for ln in run("plan", tmp_path).stdout.splitlines() if ln.startswith("needs "))
    assert room.startswith("needs 0 B, ")
    assert room.endswith(f"; {format_bytes(nbytes)} are mapped from the file")
    assert "are mapped" not in run("plan", tmp_path, "--mode", "stream").stdout


def test_a_good_plan_as_json(run, tiny):
    report = json.loads(run("plan", tiny, "--json", "--layers", "1", "--dtype", "bfloat16").stdout)
    assert report["ok"] is True
    assert report["memory"]["needed_bytes"] > 0
    assert {"loaded", "missing", "unexpected", "tied", "ignored"} <= report.keys()


def test_arrows_do_not_fail_on_a_code_page(spawn, tiny):
    done = spawn("plan", tiny, env={"PYTHONIOENCODING": "cp1252"}, errors="replace")
    assert done.returncode == 0, done.stderr
    assert "\\u2190 h.N.attn" in done.stdout


def test_a_misfit_is_listed_in_full_and_1(run, misfit):
    result = run("plan", misfit)
    assert result.exit_code == 1
    assert "missing (12):" in result.stdout
    assert "blocks.2.attn.qkv.weight" in result.stdout
    assert "shape mismatch (1):" in result.stdout
    assert "[320, 64]" in result.stdout
    problems = len(streamload.plan(misfit).problems)
    assert result.stdout.endswith(f"this load would be refused: {problems} problems\n")
    report = json.loads(run("plan", misfit, "--json").stdout)
    assert report["ok"] is False
    assert len(report["missing"]) == 12
    assert report["shape_mismatch"][0]["stored_shape"] == [320, 64]


def test_what_does_not_fit_in_memory_is_3(run, tmp_path, monkeypatch):
    import streamload.loading.calls as loading

    synthesize("gpt2-tiny", tmp_path)
    made = loading.plan_checkpoint(tmp_path, mode="stream")
    small = MemoryReport(needed_bytes=1 << 40, available_bytes=1 << 30, limit="cgroup")
    made = _with_memory(made, small)
    monkeypatch.setattr(loading, "plan_checkpoint", lambda *_, **__: made)
    result = run("plan", tmp_path)
    assert result.exit_code == 3
    assert "needs 1024.00 GiB, 1.00 GiB available (cgroup limit)" in result.stdout
    assert "would fit: --mode map" in result.stdout
    last = "this load would be refused: needs 1024.00 GiB, 1.00 GiB available (cgroup limit)"
    assert result.stdout.splitlines()[-1] == last
    assert json.loads(run("plan", tmp_path, "--json").stdout)["ok"] is False
    assert run("plan", tmp_path, "--no-check-memory").exit_code == 0


def _with_memory(plan, memory):
    return replace(plan, memory=memory)


def report_of(dtype, **changes):
    entry = LoadedTensor(("a",), "a", "float32", dtype, (2, 2), "transpose")
    return LoadReport(loaded=(entry,), **changes)


def test_what_would_fit_is_told_in_options(tiny):
    def ways(**options):
        plan = plan_checkpoint(tiny, **options)
        half = sum(tensor.nbytes // 2 for tensor in plan.tensors)
        memory = MemoryReport(needed_bytes=3 * half, available_bytes=2 * half)
        return [as_options(way) for way in ways_out(_with_memory(plan, memory))]

    dtype, mapped, layers = ways(mode="stream")
    assert dtype == "--dtype bfloat16 (about 487.0 KiB)"
    assert mapped == "--mode map (about 243.5 KiB: what is not cast is a view of the file)"
    assert layers == "--layers with about 67% of the blocks"
    # Where all is cast nothing can be a view of the file; of a converted copy it can.
    mapped, layers = ways(dtype="bfloat16", mode="stream")
    copied = "--mode map of a copy that needs no change: streamload convert SRC DST"
    assert mapped == f"{copied} --dtype bfloat16 --names local"
    assert not any("map" in way for way in ways(mode="map"))


def test_a_copy_is_offered_where_transposed_weights_are_not_mapped(run, tmp_path):
    synthesize("gpt2-tiny", tmp_path, dtype="bfloat16")
    plan = plan_checkpoint(tmp_path)
    needed = plan.memory.needed_bytes
    assert needed > 0
    memory = MemoryReport(needed_bytes=needed, available_bytes=needed // 2)
    copied, _ = (as_options(way) for way in ways_out(_with_memory(plan, memory)))
    assert copied.endswith("streamload convert SRC DST --names local")


def test_slow_notes(monkeypatch):
    monkeypatch.setattr("streamload.cli.render.advice._cpu_computes_bfloat16", lambda: False)
    monkeypatch.setattr("streamload.cli.render.advice.filesystem_of", lambda _: "nfs4")
    notes = slow_notes("x", report_of("bfloat16", layout="stored", mode="map"))
    assert [any(word in note for note in notes) for word in ("instructions", "transposed")] == [
        True,
        True,
    ]
    assert any("network disk (nfs4)" in note for note in notes)
    monkeypatch.setattr("streamload.cli.render.advice.filesystem_of", lambda _: "ext4")
    assert slow_notes("x", report_of("float32")) == []


def test_blocks_that_do_not_exist_are_named_and_the_configuration_not_blamed(run, tiny):
    result = run("plan", tiny, "--layers", "0-99")
    assert result.exit_code == 1
    assert "layers 2-99 do not exist: this model has blocks 0 to 1" in result.stderr
    assert "config.json" not in result.stderr


def test_what_each_of_many_ranks_would_read(run, tiny):
    """No ranks are needed; what is read adds up to the file, and to gaps that are read through."""
    whole = json.loads(run("plan", tiny, "--mode", "stream", "--json").stdout)
    parts = {}
    for how in ("fsdp", "tp"):
        found = json.loads(run("plan", tiny, "--shard", how, "--ranks", 4, "--json").stdout)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
        assert found["loaded"] == whole["loaded"]
        parts[how] = found["ranks"]
    stored = sum(t.nbytes for t in plan_checkpoint(tiny, mode="stream").tensors)
    wanted = [rank["bytes_read"] - rank["bytes_unwanted"] for rank in parts["fsdp"]]
    assert sum(wanted) == sum(rank["bytes_held"] for rank in parts["fsdp"]) == stored
    assert all(rank["bytes_held"] < stored / 2 for rank in parts["tp"])
    text = run("plan", tiny, "--shard", "tp", "--ranks", 4).stdout.splitlines()
    assert [line.split()[0] for line in text[-6:]] == ["rank", "0", "1", "2", "3", "all"]


def test_ranks_and_shard_go_together(run, tiny):
    for arguments in (["--shard", "tp"], ["--ranks", "4"]):
        result = run("plan", tiny, *arguments)
        assert (result.exit_code, "go together" in result.stderr) == (2, True)


def test_a_sharded_load_needs_ranks(run, tiny, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = run("load", tiny, "--shard", "fsdp")
    assert result.exit_code == 1
    assert "torch.distributed.run --nproc-per-node" in result.stderr
