"""GGUF files as sources: the contract of all sources, sets of parts, folders, other names."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf.constants import GGMLQuantizationType

import streamload
from streamload.cli.group import main as cli
from tests.families.tiny import CONFIG, llama
from tests.sources.conformance import SourceConformance
from tests.support.gguf_files import DRAWN, decoded, encoded, raw_blocks, write_gguf
from tests.support.tiny import values


def write_plain(path: Any, architecture: str = "made-up") -> dict[str, torch.Tensor]:
    """A file of an architecture without a table: every kind of tensor under its own name."""
    writer = gguf.GGUFWriter(os.fspath(path), architecture)
    expected: dict[str, torch.Tensor] = {}

    def add(name: str, data: np.ndarray, found: torch.Tensor, kind: str | None = None) -> None:
        raw = None if kind is None else GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
        expected[name] = found

    add("f32", values(1, 2, 3).numpy(), values(1, 2, 3))
    add("f16", values(2, 5).half().numpy(), values(2, 5).half())
    add("bf16", encoded(values(3, 2, 4), "BF16"), values(3, 2, 4).bfloat16(), "BF16")
    add("f64", values(4, 3).double().numpy(), values(4, 3).double())
    add("i8", np.array([-1, 2, 3], np.int8), torch.tensor([-1, 2, 3], dtype=torch.int8))
    add("i32", np.array([[7]], np.int32), torch.tensor([[7]], dtype=torch.int32))
    blocks = encoded(values(5, 3, 64), "Q8_0")
    add("q8", blocks, decoded(blocks, "Q8_0"), "Q8_0")
    for seed, kind in enumerate(DRAWN):
        blocks = raw_blocks(kind, (2, 2, 256), seed)
        add(kind.lower(), blocks, decoded(blocks, kind).reshape(2, 2, 256), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


class TestOwnNames(SourceConformance):
    @pytest.fixture
    def expected(self, tmp_path):
        return write_plain(tmp_path / "x.gguf")

    @pytest.fixture
    def source(self, tmp_path, expected):
        with streamload.open_checkpoint(tmp_path / "x.gguf") as source:
            yield source


class TestPublishedNames(SourceConformance):
    """Rows of q and k in another order; one file of three."""

    @pytest.fixture
    def expected(self, tmp_path):
        found = write_gguf(tmp_path / "x.gguf", llama(), CONFIG, "F16", shard_tensors=9)
        assert len(os.listdir(tmp_path)) == 3
        return found

    @pytest.fixture
    def source(self, tmp_path, expected):
        with streamload.open_checkpoint(tmp_path / "x-00001-of-00003.gguf") as source:
            yield source


@pytest.mark.parametrize("given", ["", "x-00001-of-00003.gguf", "x-00003-of-00003.gguf"])
def test_a_set_opens_by_its_folder_and_by_any_part(tmp_path, given):
    expected = write_gguf(tmp_path / "x.gguf", llama(), CONFIG, shard_tensors=9)
    found = streamload.load_state_dict(tmp_path / given, mapping={n: n for n in expected})
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert streamload.load(tmp_path / given).config["num_hidden_layers"] == 2


SETS = {
    "one missing": (lambda f: f[1].unlink(), "1 of 3 shards are missing: x-00002"),
    "two of another order": (
        lambda f: (f[1].rename(f[0].parent / "y"), f[2].rename(f[1]),
                   (f[0].parent / "y").rename(f[2])),
        "split.no is 2, expected 3 and 1"),
    "one twice": (lambda f: f[2].write_bytes(f[1].read_bytes()), "expected 3 and 2"),
    "no GGUF among them": (lambda f: f[2].write_bytes(b"x" * 99), "expected b'GGUF'"),
    "one cut": (lambda f: f[2].write_bytes(f[2].read_bytes()[:-33]), "cut short"),
    "alone under another name": (
        lambda f: (f[0].rename(f[0].parent / "z.gguf"), f[1].unlink(), f[2].unlink()),
        "is part 0 of 3"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SETS)
def test_faults_of_sets_are_refused_by_name(tmp_path, fault):
    write_gguf(tmp_path / "x.gguf", llama(), CONFIG, shard_tensors=9)
    change, said = SETS[fault]
    change(sorted(tmp_path.iterdir()))
    with pytest.raises(streamload.CheckpointError, match=re.escape(said)):
        streamload.open_checkpoint(tmp_path)


def test_fewer_tensors_than_the_set_has(tmp_path):
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_int32("split.tensors.count", 99)

    write_gguf(tmp_path / "x.gguf", llama(), CONFIG, extra=more)
    with pytest.raises(streamload.CheckpointError, match="count is 99, but 1 file hold 21"):
        streamload.open_checkpoint(tmp_path)


def test_a_folder_with_safetensors_too_takes_these(tmp_path):
    write_gguf(tmp_path / "x.gguf", llama(), CONFIG)
    streamload.convert(tmp_path / "x.gguf", tmp_path)
    with streamload.open_checkpoint(tmp_path) as source:
        assert {spec.file for spec in source.catalog.values()} == {
            os.fspath(tmp_path / "model.safetensors")
        }


def test_a_projector_beside_the_model_is_not_taken(tmp_path):
    write_gguf(tmp_path / "x.gguf", llama(), CONFIG)
    (tmp_path / "mmproj-x.gguf").write_bytes(b"GGUF")
    assert len(streamload.load_state_dict(tmp_path)) == 21


def test_content_decides_and_not_the_name(tmp_path):
    expected = write_plain(tmp_path / "model.safetensors")
    found = streamload.load_state_dict(tmp_path / "model.safetensors", dtype="float32")
    assert torch.equal(found["q4_k"], expected["q4_k"])


def test_any_number_of_tensors_is_gguf(tmp_path):
    """123 is the code of the sign with which a safetensors header begins, at the same byte."""
    writer = gguf.GGUFWriter(os.fspath(tmp_path / "x.gguf"), "made-up")
    for at in range(123):
        writer.add_tensor(f"t{at}", np.full(3, at, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert streamload.load_state_dict(tmp_path / "x.gguf")["t122"].tolist() == [122.0] * 3


def test_an_architecture_without_a_table_is_named_where_a_model_is_wanted(tmp_path):
    write_plain(tmp_path / "m.gguf", "rwkv7")
    with pytest.raises(streamload.CheckpointError, match="architecture 'rwkv7' has no table"):
        streamload.load(tmp_path / "m.gguf")


@pytest.mark.filterwarnings("ignore:.*decoded to float32")
def test_an_architecture_without_a_table_keeps_its_names(tmp_path):
    expected = write_plain(tmp_path / "x.gguf")
    found = streamload.load_state_dict(tmp_path / "x.gguf")
    assert found.keys() == expected.keys()
    module = torch.nn.Module()
    module.q8 = torch.nn.Parameter(torch.empty(3, 64, device="meta"))
    report = streamload.load_into(module, tmp_path / "x.gguf", mapping={"q8": "q8"}, strict=False)
    assert torch.equal(module.q8.data, expected["q8"].bfloat16())
    assert report.loaded[0].stored_dtype == "Q8_0"
    with pytest.raises(streamload.CheckpointError, match="no config"):
        streamload.load(tmp_path / "x.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(streamload.CheckpointError, match="'bert'"):
        streamload.load(tmp_path / "x.gguf")


def test_iterating_gives_values(tmp_path):
    expected = write_plain(tmp_path / "x.gguf")
    found = dict(streamload.iter_tensors(tmp_path / "x.gguf"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_plain_tensors_are_mapped(tmp_path):
    expected = write_gguf(tmp_path / "x.gguf", llama(), CONFIG)
    loaded = streamload.load(tmp_path / "x.gguf", mode="map")
    (mapped,) = re.findall(r"mapped ([\d.]+ \w+)", loaded.report.to_text())
    assert mapped.endswith("KiB")
    assert torch.equal(loaded.model.lm_head.weight.data, expected["lm_head.weight"])


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    write_plain(tmp_path / "x.gguf")
    with streamload.open_checkpoint(tmp_path / "x.gguf") as source:
        os.truncate(tmp_path / "x.gguf", os.path.getsize(tmp_path / "x.gguf") - 400)
        with pytest.raises(streamload.ReadError, match="ended early"):
            source.tensor("q6_k")
        with pytest.raises(streamload.ReadError, match="changed or replaced"):
            source.check_unchanged()


def test_heads_that_do_not_go_round_are_refused(tmp_path):
    config = {**CONFIG, "num_attention_heads": 3, "head_dim": 4, "num_key_value_heads": 2}
    tensors = {n: t for n, t in llama().items() if "q_proj" not in n}

    def odd(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((16, 16), np.float32))

    write_gguf(tmp_path / "x.gguf", tensors, config, extra=odd)
    with pytest.raises(streamload.CheckpointError, match=r"attn_q.weight.*is not 3 heads of pairs"):
        streamload.open_checkpoint(tmp_path / "x.gguf")


def test_inspect_lists_types_sizes_and_metadata(tmp_path):
    expected = write_plain(tmp_path / "x.gguf")
    done = CliRunner().invoke(cli, ["inspect", os.fspath(tmp_path / "x.gguf"), "--json"])
    found = json.loads(done.stdout)
    assert {t["name"]: t["dtype"] for t in found["tensors"]}["q5_k"] == "Q5_K"
    assert {t["name"]: t["nbytes"] for t in found["tensors"]}["q8"] == 3 * 64 // 32 * 34
    assert found["totals"]["elements"] == sum(t.numel() for t in expected.values())
    assert found["metadata"]["general.architecture"] == "made-up"
    values_of = CliRunner().invoke(cli, ["inspect", os.fspath(tmp_path / "x.gguf"), "q8", "--json"])
    assert json.loads(values_of.stdout)["mean"] == pytest.approx(expected["q8"].mean().item())


def test_verify_reads_it(tmp_path):
    write_plain(tmp_path / "x.gguf")
    done = CliRunner().invoke(cli, ["verify", os.fspath(tmp_path / "x.gguf")])
    assert done.exit_code == 0, done.output
