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


COMPRESSED = [
    *("int8 rows", "float rows", "float blocks", "int4", "int4 zeros", "int8 words"),
    *("int8 words, zeros", "int8 zeros", "nvfp4", "mxfp4 words"),
]


@pytest.mark.parametrize("kind", COMPRESSED)
def test_values_are_those_of_compressed_tensors(tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    case = CASES[kind]()
    path = case.write(tmp_path / "q")
    weights = QuantizationArgs(**case.config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    local = {n.removeprefix("a."): t for n, t in case.stored.items() if n.startswith("a.")}
    compressor = BaseCompressor.get_value_from_registry(case.config["format"])
    expected = compressor.decompress(local, scheme)["weight"]
    # It multiplies in the scales' dtype.
    found = streamload.load_state_dict(path, dtype=expected.dtype)["a.weight"]
    assert torch.equal(found, expected)


def test_all_powers_of_two():
    """As OCP's E8M0: 2 to the byte less 127, and 255 is no number."""
    from streamload.decoding.scaled_values import plain_scales

    every = torch.arange(256).to(torch.uint8)
    found = plain_scales(every)
    assert torch.equal(found[:255].double(), torch.exp2(every[:255].double() - 127))
    assert found[255].isnan()
    assert torch.equal(plain_scales(every.view(torch.float8_e8m0fnu))[:255], found[:255])
