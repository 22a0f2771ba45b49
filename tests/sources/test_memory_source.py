"""The dict-backed source: the contract, for tensors of any strides."""

import pytest
import torch

import streamload
from streamload import MemorySource
from tests.sources.conformance import SourceConformance

BASE = torch.arange(24.0).reshape(2, 3, 4)
EXPECTED = {
    "plain": BASE,
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(2, 0, 1),
    "slice": BASE[:, 1],
    "steps": torch.arange(10)[::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "conj": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "half": torch.tensor([1.5, float("inf")]).bfloat16(),
}


class TestMemorySource(SourceConformance):
    @pytest.fixture
    def expected(self):
        return {name: t.detach().resolve_conj().resolve_neg() for name, t in EXPECTED.items()}

    @pytest.fixture
    def source(self):
        return MemorySource(EXPECTED, metadata={"format": "pt"})


def test_what_is_dense_is_read_in_blocks():
    catalog = MemorySource(EXPECTED).catalog
    assert {name for name, spec in catalog.items() if spec.extent is None} == {
        "slice",
        "steps",
        "expanded",
        "conj",
        "negative",
    }
    assert catalog["transposed"].strides == BASE.transpose(0, 2).stride()
    assert catalog["plain"].strides is None


def test_it_is_public_and_names_itself():
    source = MemorySource({"w": torch.ones(2)})
    extent = source.catalog["w"].extent
    with pytest.raises(streamload.ReadError, match="<memory>: tensor 'w'"):
        source.read_into(extent, memoryview(bytearray(9)), tensor="w")


def test_a_type_that_no_table_knows_is_refused_by_name():
    odd = torch.empty(2, dtype=torch.bits8)
    with pytest.raises(streamload.CheckpointError, match=r"tensor 'q'.*bits8"):
        MemorySource({"q": odd})
