"""The header reader: what a whole file says, and every way in which one can be wrong."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from streamload.core.errors import CheckpointError
from streamload.sources.files import OpenFile
from streamload.sources.gguf.block_types import block_type
from streamload.sources.gguf.header import Header, read_header
from tests.support.gguf_bytes import F32, array, header, info, pair, text


def read(path: object, data: bytes) -> Header:
    with open(os.fspath(path), "wb") as file:  # type: ignore[call-overload]
        file.write(data)
    with OpenFile(os.fspath(path)) as opened:  # type: ignore[call-overload]
        return read_header(opened)


def test_sizes_are_the_reference_library_s():
    for kind, (elements, nbytes) in GGML_QUANT_SIZES.items():
        found = block_type(int(kind))
        assert not isinstance(found, str)
        assert (found.name, found.elements, found.nbytes) == (kind.name, elements, nbytes)


def test_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "test")
    for kind, value in {
        "uint8": 255, "int8": -3, "uint16": 65535, "int16": -300, "uint32": 2**32 - 1,
        "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5,
        "float64": 1e300, "bool": True, "string": "größe",
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.texts", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("v", np.arange(4, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with OpenFile(os.fspath(tmp_path / "x.gguf")) as file:
        found = read_header(file)
    values = {key: value for key, value in found.metadata.items() if key.startswith("a.")}
    lists = {key: list(values.pop(key)) for key in [*values] if key[2:] in _LISTS}
    assert values == {
        "a.uint8": 255, "a.int8": -3, "a.uint16": 65535, "a.int16": -300, "a.uint32": 2**32 - 1,
        "a.int32": -(2**31), "a.uint64": 2**64 - 1, "a.int64": -(2**63), "a.float32": 0.5,
        "a.float64": 1e300, "a.bool": True, "a.string": "größe",
    }  # fmt: skip
    assert lists == {
        "a.texts": ["x", "", "日本"], "a.numbers": [1, -2, 3], "a.floats": [0.25, -1.5],
        "a.flags": [1, 0],
    }  # fmt: skip
    assert found.metadata["a.bool"] is True
    w, v = found.tensors["w"], found.tensors["v"]
    assert (w.shape, w.type.name, w.extent.nbytes) == ((2, 3), "F32", 24)
    assert (v.shape, v.type.name) == ((4,), "I8")
    reference = {t.name: t.data_offset for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert {name: t.extent.offset for name, t in found.tensors.items()} == reference


_LISTS = ("texts", "numbers", "floats", "flags")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_alignment_and_versions(tmp_path, version, alignment):
    pairs = [pair("general.alignment", 4, struct.pack("<I", alignment))]
    data = header(pairs, [info("w", [2], F32, 0), info("v", [2], F32, alignment)], version=version)
    start = -(-len(data) // alignment) * alignment
    whole = data.ljust(start, b"\0") + bytes(8).ljust(alignment, b"\0") + bytes(8)
    found = read(tmp_path / "x", whole)
    assert found.tensors["v"].extent.offset == start + alignment
    assert found.spare_bytes == 0
    assert read(tmp_path / "x", whole + bytes(alignment + 5)).spare_bytes > 0


W = info("w", [4], F32, 0)
KV = pair("k", 4, bytes(4))


def whole(pairs: list[bytes], infos: list[bytes], body: int = 16) -> bytes:
    """A file whose data is ``body`` bytes long."""
    data = header(pairs, infos)
    return data.ljust(-(-len(data) // 32) * 32, b"\0") + bytes(body)


def many(count: int, pairs: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, pairs)


FAULTS = {
    "empty": (b"", "starts with b''"),
    "another mark": (b"GGML" + bytes(60), "GGUF"),
    "version 1": (whole([], []).replace(b"\3\0\0\0", b"\1\0\0\0", 1), "version 1, expected 2 or 3"),
    "version 4": (whole([], []).replace(b"\3\0\0\0", b"\4\0\0\0", 1), "version 4"),
    "version 0": (whole([], []).replace(b"\3\0\0\0", b"\0\0\0\0", 1), "version 0"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(60), "big-endian"),
    "only the mark": (b"GGUF", "cut short: the version"),
    "counts cut": (b"GGUF\3\0\0\0\1", "the number of tensors"),
    "more tensors than bytes": (many(2**40, 0) + bytes(99), "1099511627776 tensors"),
    "more pairs than bytes": (many(0, 2**63) + bytes(99), "9223372036854775808 key-value"),
    "a key cut": (many(0, 1) + struct.pack("<Q", 40) + b"abcdefgh", "cut short: a key"),
    "a long key": (many(0, 1) + struct.pack("<Q", 2**33) + bytes(99), "8589934592 bytes"),
    "an empty key": (whole([pair("", 4, bytes(4))], []), "empty key"),
    "a key twice": (whole([KV, KV], []), "duplicate key 'k'"),
    "a key that is no text": (whole([pair(b"\xff\xfe", 4, bytes(4))], []), "UTF-8"),
    "a type": (whole([pair("k", 13, bytes(8))], []), "'k' is of type 13"),
    "a bool": (whole([pair("k", 7, b"\2")], []), "'k' is the bool 2"),
    "an array of bools": (whole([pair("k", 9, array(7, 2, b"\1\5"))], []), "the bool 5"),
    "an array of arrays": (whole([pair("k", 9, array(9, 1, bytes(20)))], []), "array of arrays"),
    "an array's type": (whole([pair("k", 9, array(77, 1, bytes(20)))], []), "type 77"),
    "a huge array": (whole([pair("k", 9, array(0, 2**62, b""))], []), "array of 461168601842738"),
    "huge texts": (whole([pair("k", 9, array(8, 2**61, b""))], []), "array of 230584300921369"),
    "texts cut": (whole([pair("k", 9, array(8, 2, text("a") + b"\xff" * 8))], []), "value of 'k'"),
    "texts that are none": (
        whole([pair("k", 9, array(8, 2, text("a") + text(b"\xc3")))], []), "not valid UTF-8"),
    "a text that is none": (whole([pair("k", 8, text(b"\xed\xa0\x80"))], []), "not valid UTF-8"),
    "a long text": (whole([pair("k", 8, struct.pack("<Q", 2**60))], []), "value of 'k'"),
    "alignment 0": (whole([pair("general.alignment", 4, bytes(4))], [W]), "power of two"),
    "alignment 24": (whole([pair("general.alignment", 4, b"\x18\0\0\0")], [W]), "24, expected"),
    "alignment of text": (whole([pair("general.alignment", 8, text("32"))], [W]), "of type 8"),
    "dimensions": (whole([], [info("w", [1] * 5, F32, 0)]), "has 5 dimensions"),
    "a name twice": (whole([], [W, W], 64), "in the header twice"),
    "a name that is none": (whole([], [info(b"\xff", [4], F32, 0)]), "name is not valid UTF-8"),
    "a long name": (whole([], [info("w" * 2000, [4], F32, 0)]), "2000 bytes; the limit is 1024"),
    "a type that was removed": (whole([], [info("w", [4], 31, 0)]), "Q4_0_4_4"),
    "a type of tomorrow": (whole([], [info("w", [4], 99, 0)]), "type 99, which is unknown"),
    "half a block": (whole([], [info("w", [33], 8, 0)], 99), "33 elements are not whole blocks"),
    "too many elements": (whole([], [info("w", [2**40, 2**40], F32, 0)]), "more elements than"),
    "an overlap": (whole([], [W, info("v", [4], F32, 0)], 64), "expected byte 32"),
    "a hole": (whole([], [W, info("v", [4], F32, 64)], 99), "'v': starts at byte 64"),
    "not aligned": (whole([], [info("w", [4], F32, 4)], 64), "byte 4 of the data, expected byte 0"),
    "beyond": (whole([], [info("w", [4], F32, 2**63)]), "which no file has"),
    "data cut": (whole([], [W], 15), "'w': ends at byte"),
    "no data": (header([], [W]), "cut short"),
    "tensors cut": (header([], [W, W])[:-9], "cut short"),
    "another version of blocks": (
        whole([pair("general.quantization_version", 4, b"\1\0\0\0")], [info("w", [32], 8, 0)], 34),
        "quantization_version is 1, expected 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path, fault):
    data, said = FAULTS[fault]
    with pytest.raises(CheckpointError) as info:
        read(tmp_path / "x.gguf", data)
    assert said in str(info.value)
    assert info.value.path == os.fspath(tmp_path / "x.gguf")


def test_every_cut_is_refused(tmp_path):
    pairs = [pair("a", 9, array(8, 2, text("one") + text("two"))), pair("b", 8, text("x")), KV]
    data = whole(pairs, [W, info("v", [2, 3], F32, 32)], 56)
    assert len(read(tmp_path / "x", data).tensors) == 2
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"cut short|GGUF"):
            read(tmp_path / "x", data[:length])


def test_all_tensors_at_fault_are_listed(tmp_path):
    infos = [info("a", [4], 99, 0), info("b", [33], 8, 0), info("c", [4], F32, 0)]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "x", whole([], infos))
    assert len(caught.value.problems) == 2
    assert all(f"'{name}'" in str(caught.value) for name in "ab")


def test_texts_of_a_large_vocabulary_are_read_only_when_asked_for(tmp_path):
    tokens = [f"token{at}" for at in range(50_000)]
    data = whole([pair("k", 9, array(8, len(tokens), b"".join(map(text, tokens))))], [])
    found = read(tmp_path / "x", data).metadata["k"]
    assert len(found) == 50_000  # type: ignore[arg-type]
    assert found[49_999] == found[-1] == "token49999"  # type: ignore[index]
    assert found[3:5] == ["token3", "token4"]  # type: ignore[index]
    assert list(found) == tokens  # type: ignore[arg-type]


def test_inspect_needs_neither_torch_nor_the_library(tmp_path):
    (tmp_path / "x.gguf").write_bytes(whole([pair("general.architecture", 8, text("x"))], [W]))
    code = (
        "import sys\n"
        "from streamload.cli.group import main\n"
        f"main(['inspect', {str(tmp_path / 'x.gguf')!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'gguf', 'tokenizers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "w" in done.stdout
