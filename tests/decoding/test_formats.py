"""Every format against float64 arithmetic, and against transformers' own decoding."""

from __future__ import annotations

import pytest
import torch

import streamload
from tests.decoding.quantised import CASES


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_number_times_scale(tmp_path, kind, dtype):
    case = CASES[kind]()
    path = case.write(tmp_path / "q")
    found = streamload.load_state_dict(path, dtype=dtype)
    assert found.keys() == case.values.keys()
    for name, values in case.values.items():
        # A product of float32 is the exact one, rounded once.
        assert torch.equal(found[name], values.float().to(dtype)), name
        assert found[name].is_contiguous()
    small = streamload.load_state_dict(path, dtype=dtype, workers=2, chunk_bytes=700)
    assert all(torch.equal(small[name], found[name]) for name in found)
