"""``python -m bench device``: its checks on the fake device, and that each of them can fail."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import streamload
from bench.__main__ import main
from bench.device import faults, rates, running, values
from bench.device.machine import Cuda
from bench.device.rows import Check, Row, Sizes, passed
from streamload.engine import on_layer as handing_out
from streamload.engine.lanes import choice
from streamload.loading import iterating
from tests.engine.devices.fake_device import FakeOps

DEVICE = "cuda:0"
PLENTY_BYTES = 1 << 40


class Pretended:
    """A machine whose device is the fake one; see Machine."""

    device = DEVICE
    memory = "cpu"
    others = ("cuda:1",)
    seed = 0

    def __init__(self):
        self.held_bytes = 0
        self.limit_bytes = PLENTY_BYTES

    def facts(self):
        return {"device": "a fake one"}

    def synchronize(self):
        pass

    def allocated_bytes(self):
        return self.held_bytes

    def free_bytes(self):
        return self.limit_bytes - self.held_bytes

    def fill(self, but_bytes):
        self.limit_bytes = self.held_bytes + but_bytes
        filler = torch.empty(0)
        weakref.finalize(filler, setattr, self, "limit_bytes", PLENTY_BYTES)
        return filler

    def copy_s(self, nbytes, piece_bytes, *, pinned):
        return nbytes / 1e9

    def keep_busy(self, milliseconds):
        pass

    def has_context(self, device):
        return False

    def operations(self, device):
        machine = self
        machine.seed += 1

        class Ops(FakeOps):
            def free_bytes(self):
                return machine.free_bytes()

            def wait(self, stream, event):
                super().wait(stream, event)
                if stream is self.current():  # the host is what computes with the tensors
                    self.synchronize(event)

            def allocate(self, tensor):
                if tensor.nbytes > machine.free_bytes():
                    raise torch.OutOfMemoryError("CUDA out of memory")
                made = super().allocate(tensor)
                machine.held_bytes += tensor.nbytes
                weakref.finalize(made, machine.let_go, tensor.nbytes)
                return made

        return Ops(machine.seed, device=device)

    def let_go(self, nbytes):
        self.held_bytes -= nbytes


@pytest.fixture
def machine(monkeypatch):
    made = Pretended()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choice, "_operations", made.operations)
    monkeypatch.setattr(handing_out, "_is_on", lambda *_: True)
    monkeypatch.setattr(iterating, "_making", lambda _: contextlib.nullcontext())
    return made


@pytest.fixture
def sizes(tmp_path):
    return Sizes(
        str(tmp_path),
        file_bytes=2 << 20,
        part_bytes=8192,
        small=300,
        experts=2,
        turns=10,
        loads=3,
        workers=(1, 2),
    )


HERE = [c for c in running.CHECKS if c.name not in ("marked tests", "sanitizer", "peers")]


@pytest.mark.parametrize("check", HERE, ids=lambda check: check.name)
def test_each_check_on_the_fake(check, machine, sizes):
    rows = list(running.run_one(check, machine, sizes))
    assert rows
    # What a device of nothing but host memory does in a second is no figure to judge.
    bad = [row for row in rows if row.ok is False and "ceiling" not in row.what]
    assert not bad
    assert not machine.held_bytes


def test_peers_that_are_not_there_are_told(machine, sizes, monkeypatch):
    def absent(path, device):
        raise ImportError

    def broken(path, device):
        raise ValueError("no such device")

    monkeypatch.setattr(rates, "_load_s", lambda *_, **__: 0.001)
    there = {"a": lambda path, device: time.sleep(0.01), "b": absent, "c": broken}
    monkeypatch.setattr(rates, "PEERS", there)
    monkeypatch.setattr(rates, "_large", lambda sizes: rates.files.random_bits(
        sizes.folder, "large", 1, 1 << 16))  # fmt: skip
    found = {row.what: row for row in rates.peers(machine, sizes)}
    assert found["a"].ok
    assert found["b"].found == "not installed"
    assert "no such device" in found["c"].found


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 4096}])
def test_decoded_tensors_come_as_from_the_cpu(machine, tmp_path, options):
    made = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(4):
        weight = torch.randn(256, 384, generator=made)
        tensors[f"l.{layer}.weight"] = weight.to(torch.float8_e4m3fn)
        tensors[f"l.{layer}.weight_scale_inv"] = torch.rand(2, 3, generator=made)
        tensors[f"l.{layer}.norm"] = torch.randn(33, generator=made)
    save_file(tensors, tmp_path / "model.safetensors")
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantized}))
    options = {"dtype": "bfloat16", **options}
    expected = streamload.load_state_dict(tmp_path, **options)
    assert "l.0.weight_scale_inv" not in expected
    found = streamload.load_state_dict(tmp_path, device=DEVICE, **options)
    assert not values.differing(found, expected)
    expected = dict(streamload.iter_tensors(tmp_path, dtype="bfloat16"))
    found = dict(streamload.iter_tensors(tmp_path, dtype="bfloat16", device=DEVICE))
    assert not values.differing(found, expected)


class TestEachCheckCanFail:
    def test_casts(self, machine, sizes, monkeypatch):
        monkeypatch.setattr(values, "differing", lambda *_: ["float.F32"])
        assert not any(row.ok for row in values.casts(machine, sizes))

    def test_values_that_differ_are_named_and_nans_are_alike(self):
        one = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([0.0])}
        two = {"a": torch.tensor([1.0, -float("nan")]), "b": torch.tensor([-0.0])}
        assert values.differing(one, two) == ["b"]
        assert values.differing(one, {"a": one["a"]}) == ["b"]
        assert values.differing({"a": one["a"].half()}, {"a": one["a"]}) == ["a"]
        assert not values.differing({"a": torch.empty(0, 3)}, {"a": torch.empty(0, 3)})

    def test_overflows(self, machine, sizes, monkeypatch):
        monkeypatch.setattr(FakeOps, "counters", lambda self, n, s: torch.zeros(n).long())
        monkeypatch.setattr("streamload.engine.lanes.device.can_overflow", lambda *_: False)
        (row,) = values.overflows(machine, sizes)
        assert row == passed("an overflow is found", False, "0 of 10")

    def test_leaks(self, machine, sizes, monkeypatch):
        kept = []
        load = faults.streamload.load_state_dict
        monkeypatch.setattr(
            faults.streamload, "load_state_dict", lambda *a, **k: kept.append(load(*a, **k))
        )
        assert not next(iter(faults.leaks(machine, sizes))).ok

    def test_a_load_that_should_have_failed(self, machine):
        assert not faults._fails(machine, "x", ValueError, lambda: None).ok
        assert not faults._fails(machine, "x", ValueError, lambda: {}["x"]).ok

    def test_the_second_device(self, machine, sizes, monkeypatch):
        monkeypatch.setattr(machine, "has_context", lambda device: device == DEVICE)
        assert not next(iter(faults.two_devices(machine, sizes))).ok


class TestRunning:
    CHECKS = (Check("one", 20, None), Check("two", 1, None), Check("three", 20, None))
    CHILD = (
        "import sys, time\n"
        "print('noise')\n"
        'print(\'{"what": "a", "found": "1", "must": "", "ok": null}\', flush=True)\n'
        "if sys.argv[1] == 'two': time.sleep(60)\n"
        "if sys.argv[1] == 'three': sys.exit('broken off')\n"
    )

    def test_each_is_ended_in_time_and_keeps_what_it_found(self, sizes, monkeypatch):
        monkeypatch.setattr(running, "CHECKS", self.CHECKS)
        command = (sys.executable, "-c", self.CHILD)
        one, two, three = running.run_all(sizes, command=command)
        assert [row["what"] for row in one["rows"]] == ["a"]
        assert [row["found"] for row in two["rows"]] == ["1", "stopped after 1 s"]
        assert two["seconds"] < 10
        assert "broken off" in three["rows"][1]["found"]
        text = running.report([one, two, three])
        assert "2 not as they must be" in text

    def test_what_finds_no_time_is_told(self, sizes, monkeypatch):
        monkeypatch.setattr(running, "CHECKS", self.CHECKS)
        lines = list(running.run_all(sizes, total_s=1, only=("one", "three")))
        assert [line["name"] for line in lines] == ["one", "three"]
        assert all(line["rows"][0]["found"] == "no time was left" for line in lines)

    def test_an_error_is_a_row(self, sizes):
        def run(machine, sizes):
            yield Row("a", "1")
            raise ValueError("broken")

        rows = list(running.run_one(Check("x", 1, run), Pretended(), sizes))
        assert [row.ok for row in rows] == [None, False]
        assert "ValueError: broken" in rows[1].found

    def test_all_of_it_fits_in_ten_minutes(self):
        """Each at its limit would not: the last ones then get what is left."""
        assert len({check.name for check in running.CHECKS}) == len(running.CHECKS)
        assert running.TOTAL_S == 600
        assert all(0 < check.limit_s <= 120 for check in running.CHECKS)


class TestCommand:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
    def test_without_a_device_it_says_so_in_one_line(self):
        done = CliRunner().invoke(main, ["device"])
        assert done.exit_code == 1
        assert done.output.startswith("Error: this needs a CUDA device: torch ")
        assert done.output.count("\n") == 1

    def test_an_unknown_check(self):
        done = CliRunner().invoke(main, ["device", "--only", "speed"])
        assert done.exit_code == 2
        assert "no check 'speed'" in done.output

    def test_lines_and_table(self, tmp_path, monkeypatch):
        line = {"name": "a", "seconds": 1.0, "rows": [vars(Row("b", "c", "d", False))]}
        monkeypatch.setattr(Cuda, "absent", staticmethod(lambda: None))
        monkeypatch.setattr(running, "run_all", lambda *a, **k: [line])
        path = tmp_path / "out" / "figures.json"
        done = CliRunner().invoke(main, ["device", "--json", str(path)])
        assert done.exit_code == 1
        assert "NOT OK" in done.output
        assert json.loads(path.read_text()) == [line]
