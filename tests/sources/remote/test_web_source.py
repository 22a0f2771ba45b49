"""Checkpoints on a web server: the contract of all sources, whatever the files are."""

import json

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.sources.torch.torch_files import TorchSource
from tests.sources.conformance import SourceConformance
from tests.support.remote import tree
from tests.support.tiny import GPT2_CONFIG, gpt2_tensors, same_bits, write, write_gpt2

EXPECTED = {
    "f32": torch.arange(60_000.0).reshape(200, 300),
    "bf16": torch.tensor([1.0, -2.5, float("nan")]).bfloat16(),
    "scalar": torch.tensor(-2.5),
    "empty": torch.zeros(2, 0, dtype=torch.float16),
    "ints": torch.tensor([0, 40000, 16777217]),
    "bool": torch.tensor([True, False, True]),
}


class Conformance(SourceConformance):
    @pytest.fixture
    def expected(self):
        return EXPECTED

    def test_nothing_is_mapped(self, source, expected):
        assert source.is_remote
        assert source.reason_to_read()
        assert source.mapped("f32") is None


class TestOneFile(Conformance):
    @pytest.fixture
    def source(self, site, tmp_path):
        write(tmp_path / "x.safetensors", EXPECTED)
        site.files = tree(tmp_path)
        with streamload.open_checkpoint(f"{site.url}/x.safetensors") as opened:
            yield opened


class TestIndexedShards(Conformance):
    @pytest.fixture
    def source(self, site, tmp_path):
        write_shards(tmp_path)
        site.files = tree(tmp_path, "a folder/")
        with streamload.open_checkpoint(f"{site.url}/a folder") as opened:
            assert opened.path == f"{site.url}/a%20folder"
            yield opened


class TestTorchFile(Conformance):
    @pytest.fixture
    def source(self, site, tmp_path):
        torch.save(EXPECTED, tmp_path / "pytorch_model.bin")
        site.files = tree(tmp_path)
        with streamload.open_checkpoint(site.url) as opened:
            assert isinstance(opened, TorchSource)
            yield opened


class TestServerThatSendsSmallFilesWhole(Conformance):
    """As ``python -m http.server``, which knows no ranges."""

    @pytest.fixture
    def source(self, site, tmp_path):
        site.ranges = False
        write(tmp_path / "x.safetensors", EXPECTED)
        site.files = tree(tmp_path)
        with streamload.open_checkpoint(f"{site.url}/x.safetensors") as opened:
            yield opened


def write_shards(folder):
    names = list(EXPECTED)
    held = {"one.safetensors": names[:2], "sub/two 2.safetensors": names[2:]}
    for file, part in held.items():
        write(folder / file, {name: EXPECTED[name] for name in part})
    index = {"weight_map": {name: file for file, part in held.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_headers_are_read_of_a_checkpoint_that_is_looked_at(site, tmp_path):
    write_gpt2(tmp_path, gpt2_tensors(vocab=5000))
    site.files = tree(tmp_path)
    header = int.from_bytes(site.files["model.safetensors"][:8], "little")
    with streamload.open_checkpoint(site.url) as source:
        assert source.config()[0] == GPT2_CONFIG
        received, answers = source.received()
    assert received <= max(header + 8, 4096) + len(site.files["config.json"])
    assert answers <= 3
    weights = [wanted for _, path, wanted in site.requests if path == "model.safetensors"]
    assert weights[0] == "bytes=0-4095"
    assert len(weights) <= 2


def test_shards_that_are_not_there_are_all_named(site, tmp_path):
    write_shards(tmp_path)
    site.files = tree(tmp_path)
    del site.files["one.safetensors"]
    del site.files["sub/two 2.safetensors"]
    with pytest.raises(CheckpointError, match=r"2 of 2 shards are missing") as info:
        streamload.open_checkpoint(f"{site.url}/model.safetensors.index.json")
    assert len(info.value.problems) == 2


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nothing/", "a web server does not list a folder"),
        ("nothing", "a web server does not list a folder"),
        ("x.safetensors", "404"),
        ("model.safetensors.index.json", "404"),
    ],
)
def test_what_is_not_there(site, path, text):
    with pytest.raises(CheckpointNotFoundError, match=text) as info:
        streamload.open_checkpoint(f"{site.url}/{path}")
    assert site.url in str(info.value)
    assert len(site.requests) <= 7  # not asked again and again


def test_a_file_without_an_ending(site, tmp_path):
    write(tmp_path / "blob", EXPECTED)
    site.files = tree(tmp_path)
    with streamload.open_checkpoint(f"{site.url}/blob") as source:
        assert same_bits(source.tensor("f32"), EXPECTED["f32"])


def test_an_empty_file(site):
    site.files["x.safetensors"] = b""
    with pytest.raises(CheckpointError, match="empty"):
        streamload.open_checkpoint(f"{site.url}/x.safetensors")


def test_a_web_page_in_place_of_the_file(site):
    site.files["x.safetensors"] = b"<!DOCTYPE html><html>log in first</html>"
    with pytest.raises(CheckpointError, match="web page"):
        streamload.open_checkpoint(f"{site.url}/x.safetensors")


@pytest.mark.parametrize(
    "address",
    ["https://", "http:///x", "https://[::1/x", "http://host:port/x", "https://a b/x", "s3://",
     "s3:///key", "gs://a b/c", "az://b?sig=SECRET", "s3://id:SECRET@bucket/key", "http://\udcff/"],
)  # fmt: skip
def test_what_is_no_address(address):
    with pytest.raises(CheckpointError) as info:
        streamload.open_checkpoint(address)
    assert "SECRET" not in str(info.value)
