"""Overflow counts where several tensors come from one, in place, and with arithmetic."""

from __future__ import annotations

import pytest
import torch

import streamload
from streamload import Chain, NameMap, Rule, Split, Sum, Transpose
from tests.support.tiny import assert_unchanged, bag, bag_of, same_bits, state_of, write

INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = torch.finfo(torch.float32).max
# Halfway between the largest bfloat16 and the next power of two: the first float32 that rounds up
# to infinity (ties go to even), and the last that does not.
BFLOAT16_BORDER = 2.0**128 - 2.0**119

# stored, target, values, how many of the finite ones are lost
CASES = {
    "bfloat16 to float16": ("bfloat16", "float16", [65280.0, 65536.0, -1e38, INF, NAN], 2),
    "float32 to float16": ("float32", "float16", [65519.0, 65520.0, -65520.0, -INF, NAN], 2),
    "float64 to float32": ("float64", "float32", [3.4028235e38, 3.5e38, -1e300, INF, NAN], 2),
    "float64 to bfloat16": ("float64", "bfloat16", [3.38e38, 1e300, NAN, INF], 1),
    "float32 to bfloat16": (
        "float32",
        "bfloat16",
        [FLOAT32_MAX, BFLOAT16_BORDER, BFLOAT16_BORDER * (1 - 2**-24), -FLOAT32_MAX, INF, NAN],
        3,
    ),
    "nothing lost": ("float32", "float16", [INF, -INF, NAN, 65504.0], 0),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_just_the_finite_ones_that_became_infinite(tmp_path, case, in_place, turned):
    stored, target, values, lost = CASES[case]
    values = torch.tensor(values, dtype=torch.float64).to(getattr(torch, stored))
    held = torch.ones(len(values), 6, dtype=values.dtype)
    held[:, 2] = values
    path = write(tmp_path / "x.safetensors", {"w": held})
    shape = (6, len(values)) if turned else (len(values), 6)
    wanted = held.t() if turned else held
    dtype = getattr(torch, target)
    module = bag({"w": shape}, **({"device": "cpu", "dtype": dtype} if in_place else {}))
    options = {} if in_place else {"dtype": target}
    table = NameMap((Rule("w", "w", Transpose() if turned else None),))
    report = streamload.load_into(module, path, mapping=table, chunk_bytes=16, **options)
    told = [n for n in report.notices if "overflow" in n]
    name = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[target]
    assert told == [f"'w': {lost} finite values overflow {name}"] * bool(lost)
    exact = wanted.to(dtype)
    assert torch.equal(torch.isnan(module.w), torch.isnan(exact)), "NaN stays NaN"
    assert torch.equal(module.w.nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits(tmp_path, target):
    values = torch.tensor([1.0, 448.0, 1e6, -1e6, INF, NAN])
    path = write(tmp_path / "x.safetensors", {"w": values})
    dtype = getattr(torch, target)
    lost = int((values.isfinite() & ~values.to(dtype).float().isfinite()).sum())
    module = bag({"w": (6,)})
    report = streamload.load_into(module, path, dtype=target)
    assert len([n for n in report.notices if f"{lost} finite" in n]) == (lost > 0)
    assert same_bits(module.w.detach().view(torch.uint8), values.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("chunk_bytes", [8, 64, None])
def test_one_stored_tensor_for_three(tmp_path, turned, chunk_bytes):
    """Each target is told its own count; values that fall in none count nowhere."""
    held = torch.ones(12, 5)
    held[0, 0] = held[4, 1] = held[5, 2] = held[11, 4] = 1e6
    path = write(tmp_path / "x.safetensors", {"w": held.t().contiguous() if turned else held})
    steps = (Transpose(), Split(0, (4, 4, 4))) if turned else (Split(0, (4, 4, 4)),)
    table = NameMap((Rule("w", ("q", "k", "v"), Chain(*steps)),))
    module = bag(dict.fromkeys("qkv", (4, 5)))
    report = streamload.load_into(
        module, path, mapping=table, dtype="float16", chunk_bytes=chunk_bytes
    )
    assert sorted(n for n in report.notices if "overflow" in n) == [
        "'k': 2 finite values overflow F16",
        "'q': 1 finite values overflow F16",
        "'v': 1 finite values overflow F16",
    ]


def test_sums_are_counted_too(tmp_path):
    path = write(
        tmp_path / "x.safetensors", {"a": torch.full((3,), 4e4), "b": torch.full((3,), 3e4)}
    )
    module = bag({"w": (3,)})
    table = NameMap((Rule(("a", "b"), "w", Sum()),))
    report = streamload.load_into(module, path, mapping=table, dtype="float16")
    assert "'w': 3 finite values overflow F16" in report.notices
    fresh = bag({"w": (3,)})
    with pytest.raises(streamload.StreamloadError, match="3 finite values overflow F16"):
        streamload.load_into(fresh, path, mapping=table, dtype="float16", overflow="refuse")
    assert fresh.w.is_meta


HOT = {
    "a": torch.ones(40, 8),
    "b": torch.full((8, 8), 1e5),
    "c": torch.tensor([1.0, 1e9]),
    "n": torch.tensor([1 << 40]),
}


class TestRefuse:
    @pytest.fixture
    def path(self, tmp_path):
        return write(tmp_path / "x.safetensors", HOT)

    def module(self):
        made = bag_of({k: v for k, v in HOT.items() if k != "n"}, device="cpu",
                      dtype=torch.float16)  # fmt: skip
        made.register_buffer("n", torch.tensor([0]))
        return made

    @pytest.mark.parametrize("workers", [1, 3])
    def test_what_holds_data_is_not_touched(self, path, workers):
        module = self.module()
        before = state_of(module)
        with pytest.raises(streamload.StreamloadError) as info:
            streamload.load_into(module, path, overflow="refuse", workers=workers, chunk_bytes=64)
        text = str(info.value)
        assert "x.safetensors" in text
        assert "'b': 64 finite values overflow F16" in text
        assert "'c': 1 finite values overflow F16" in text
        assert "already overwritten" not in text
        assert not hasattr(info.value, "overwritten")
        assert_unchanged(module, before)

    def test_what_fits_is_loaded_all_the_same(self, path):
        module = bag_of(HOT, device="cpu")
        del module.n
        module.register_buffer("n", torch.tensor([0]))
        assert streamload.load_into(module, path, overflow="refuse").ok
        assert module.n.item() == 1 << 40

    def test_the_report_says_it_where_that_is_asked(self, path):
        report = streamload.load_into(self.module(), path)
        assert len([n for n in report.notices if "overflow" in n]) == 2


def test_scaled_eight_bit_weights_are_never_plain_numbers(tmp_path):
    tensors = {
        "w": torch.tensor([[448.0, -448.0]]).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.tensor([2.0**-9]),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    module = bag({"w": (1, 2)})
    with pytest.raises(streamload.PlanError, match="w_scale_inv"):
        streamload.load_into(module, path, dtype="bfloat16")
    assert module.w.is_meta
    for options in ({"strict": False}, {"mapping": {"w": "w"}, "strict": False}):
        fresh = bag({"w": (1, 2)})
        report = streamload.load_into(fresh, path, dtype="bfloat16", **options)
        assert any("scale" in n and "'w'" in n for n in report.notices), report.notices
