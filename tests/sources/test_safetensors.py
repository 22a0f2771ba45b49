"""The safetensors source: the contract, element types, files that change under it."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import streamload
from streamload.core.errors import ReadError
from streamload.core.specs import Extent
from streamload.sources import files
from streamload.system import descriptors
from tests.sources.conformance import SourceConformance
from tests.support.tiny import container, entry, same_bits, write

EXPECTED = {
    "f32": torch.arange(6.0).reshape(2, 3),
    "bf16": torch.tensor([1.0, -2.5, float("nan")]).bfloat16(),
    "scalar": torch.tensor(-2.5),
    "empty": torch.zeros(2, 0, dtype=torch.float16),
    "ints": torch.tensor([0, 40000, 16777217]),
    "bool": torch.tensor([True, False, True]),
}


class TestOneFile(SourceConformance):
    @pytest.fixture
    def expected(self):
        return EXPECTED

    @pytest.fixture
    def source(self, tmp_path):
        with streamload.open_checkpoint(write(tmp_path / "x.safetensors", EXPECTED)) as opened:
            yield opened


class TestShards(SourceConformance):
    @pytest.fixture
    def expected(self):
        return EXPECTED

    @pytest.fixture
    def source(self, tmp_path):
        names = list(EXPECTED)
        for at, part in enumerate((names[:2], names[2:]), 1):
            path = tmp_path / f"model-{at:05d}-of-00002.safetensors"
            write(path, {name: EXPECTED[name] for name in part})
        with streamload.open_checkpoint(tmp_path) as opened:
            yield opened


class TestWithoutPreadAndFadvise(TestOneFile):
    """As on macOS and Windows, where these calls are missing."""

    @pytest.fixture(autouse=True)
    def _taken_away(self, monkeypatch):
        for name in ("preadv", "posix_fadvise"):
            monkeypatch.delattr(os, name)


# One tensor of every element type with bytes set by hand (the format's Dtype enumeration).
TYPES = {
    "BOOL": ([3], "010001"),
    "U8": ([2], "00ff"),
    "I8": ([2], "80ff"),
    "I16": ([2], "0080ff7f"),
    "U16": ([2], "ffff0100"),
    "F16": ([2], "003c00bc"),
    "BF16": ([2], "803f80bf"),
    "I32": ([1], "00000080"),
    "U32": ([1], "ffffffff"),
    "F32": ([1], "0000803f"),
    "F64": ([1], "000000000000f0bf"),
    "I64": ([1], "0000000000000080"),
    "U64": ([1], "ffffffffffffffff"),
    "C64": ([1], "0000803f000000c0"),
    "F8_E4M3": ([4], "7e7f38b8"),
    "F8_E5M2": ([4], "7b7c7e3c"),
    "F8_E8M0": ([2], "7f80"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "misaligned"])
def test_every_element_type_comes_out_bit_by_bit(tmp_path, dtype, odd):
    shape, text = TYPES[dtype]
    raw = bytes.fromhex(text)
    front = b"\x07" * odd
    header = {"x": entry(dtype, shape, len(front), len(front) + len(raw))}
    if odd:
        header["front"] = entry("U8", [1], 0, 1)
    path = tmp_path / "x.safetensors"
    path.write_bytes(container(header, front + raw))
    for tensors in (
        streamload.load_state_dict(path),
        streamload.load_state_dict(path, mode="map"),
        dict(streamload.iter_tensors(path)),
    ):
        found = tensors["x"]
        assert list(found.shape) == shape
        assert found.data_ptr() % found.element_size() == 0, "parameters end up aligned"
        assert bytes(found.view(torch.uint8).tolist()).hex() == text


@pytest.mark.parametrize(("dtype", "nbytes"), [("F4", 8), ("F6_E2M3", 12), ("F6_E3M2", 12)])
def test_types_without_a_torch_counterpart_are_listed_not_loaded(tmp_path, dtype, nbytes):
    path = tmp_path / "x.safetensors"
    body = bytes(nbytes) + b"\0\0\x80\x3f"
    header = {"x": entry(dtype, [2, 8], 0, nbytes), "w": entry("F32", [1], nbytes, nbytes + 4)}
    path.write_bytes(container(header, body))
    with streamload.open_checkpoint(path) as source:
        assert source.catalog["x"].nbytes == nbytes
    for call in (streamload.load_state_dict, lambda p: list(streamload.iter_tensors(p))):
        with pytest.raises(streamload.PlanError, match=rf"'x'.*{dtype}"):
            call(path)
    assert dict(streamload.iter_tensors(path, names=["w"]))["w"].tolist() == [1.0]


@pytest.mark.parametrize("odd", [2, 255])
def test_a_bool_that_is_neither_is_refused(tmp_path, odd):
    path = tmp_path / "x.safetensors"
    path.write_bytes(container({"x": entry("BOOL", [3], 0, 3)}, bytes([0, 1, odd])))
    for call in (streamload.load_state_dict, lambda p: list(streamload.iter_tensors(p))):
        with pytest.raises(streamload.CheckpointError, match=r"x\.safetensors: tensor 'x'.*BOOL"):
            call(path)


def test_shapes_without_elements_and_without_dimensions(tmp_path):
    path = tmp_path / "x.safetensors"
    huge = {"x": entry("F32", [0, 2**62], 0, 0), "s": entry("F32", [], 0, 4)}
    path.write_bytes(container(huge, b"\0\0\x20\xc0"))
    tensors = streamload.load_state_dict(path)
    assert tensors["x"].shape == (0, 2**62)
    assert tensors["s"].shape == ()
    assert tensors["s"].item() == -2.5


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for at in (1, 2):
        write(
            tmp_path / f"m-{at:05d}-of-00002.safetensors", {"a": torch.ones(at), "b": torch.ones(1)}
        )
    with pytest.raises(streamload.CheckpointError, match="duplicate key 'a'") as info:
        streamload.open_checkpoint(tmp_path)
    assert len(info.value.problems) == 2


def same_size_and_time(change):
    """A change that puts the modification time back."""

    def do(path):
        time.sleep(0.02)  # the system's clock of files ticks every few milliseconds
        before = os.stat(path)
        change(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = os.stat(path)
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    return do


def removed_and_copied(path):
    write(path + ".new", {"w": torch.zeros(4096)})
    os.unlink(path)
    shutil.copy(path + ".new", path)


def copied_over(path):
    """In place: the inode stays."""
    write(path + ".new", {"w": torch.zeros(4096)})
    inode = os.stat(path).st_ino
    with open(path + ".new", "rb") as new, open(path, "r+b") as old:
        shutil.copyfileobj(new, old)
    assert os.stat(path).st_ino == inode


def copied_with_times(path):
    write(path + ".new", {"w": torch.zeros(4096)})
    shutil.copystat(path, path + ".new")
    shutil.copy2(path + ".new", path)


def cut(path):
    os.truncate(path, os.path.getsize(path) - 4000)


def written(path):
    with open(path, "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(1, 1))


def replaced(path):
    write(path + ".new", {"w": torch.zeros(4096)})
    os.replace(path + ".new", path)


def gone(path):
    os.unlink(path)


CHANGES = [
    cut,
    written,
    replaced,
    gone,
    *map(same_size_and_time, (replaced, removed_and_copied, copied_over, copied_with_times)),
]


class TestChanges:
    """A file that is cut, written or replaced after it was opened."""

    @pytest.fixture
    def path(self, tmp_path):
        return write(tmp_path / "x.safetensors", {"w": torch.arange(4096.0)})

    @pytest.mark.parametrize("change", CHANGES)
    def test_it_is_noticed(self, path, change):
        with streamload.open_checkpoint(path) as source:
            source.check_unchanged()
            change(path)
            with pytest.raises(ReadError, match=r"x\.safetensors"):
                source.check_unchanged()
            with pytest.raises(ReadError, match=r"x\.safetensors"):
                source.tensor("w")

    @pytest.mark.parametrize("change", CHANGES)
    def test_it_is_noticed_when_the_file_is_opened_again(self, path, change, monkeypatch):
        monkeypatch.setattr(descriptors, "_MOST_IDLE", 0)
        with streamload.open_checkpoint(path) as source:
            change(path)
            with pytest.raises(ReadError, match=r"x\.safetensors"):
                source.read_into(source.catalog["w"].extent, memoryview(bytearray(16384)))

    def test_reading_changes_nothing(self, path):
        with streamload.open_checkpoint(path) as source:
            streamload.load_state_dict(path)
            streamload.load_state_dict(path, mode="map")
            source.check_unchanged()

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("mode", ["stream", "map"])
    def test_a_load_across_it_fails_and_gives_nothing(self, path, change, mode, monkeypatch):
        inner = files.OpenFile.check_unchanged

        def change_first(self):
            change(path)
            monkeypatch.setattr(files.OpenFile, "check_unchanged", inner)
            inner(self)

        monkeypatch.setattr(files.OpenFile, "check_unchanged", change_first)
        with pytest.raises(ReadError, match=r"x\.safetensors"):
            streamload.load_state_dict(path, mode=mode)

    def test_a_cut_file_is_a_short_read(self, path):
        with streamload.open_checkpoint(path) as source:
            cut(path)
            with pytest.raises(ReadError, match="the file ended early") as info:
                source.read_into(
                    source.catalog["w"].extent, memoryview(bytearray(16384)), tensor="w"
                )
        assert (info.value.path, info.value.tensor) == (path, "w")


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_reads_that_bring_less_than_asked_are_continued(tmp_path, monkeypatch, most):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: whole(fd, [parts[0][:most]], at))
    path = write(tmp_path / "x.safetensors", {"w": torch.arange(500.0)})
    assert same_bits(streamload.load_state_dict(path)["w"], torch.arange(500.0))


def test_an_input_output_error_names_file_and_tensor(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"w": torch.arange(500.0)})

    def fail(descriptor, parts, offset):
        raise OSError(5, "Input/output error")

    with streamload.open_checkpoint(path) as source:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ReadError, match=r"x\.safetensors: tensor 'w'.*Input/output") as info:
            source.read_into(Extent(path, 200, 8), memoryview(bytearray(8)), tensor="w")
    assert info.value.errno == 5


def test_an_interrupted_read_goes_on(tmp_path, monkeypatch):
    path, whole, count = write(tmp_path / "x.safetensors", {"w": torch.arange(9.0)}), os.preadv, [0]

    def now_and_then(descriptor, parts, offset):
        count[0] += 1
        if count[0] % 2:
            raise InterruptedError
        return whole(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", now_and_then)
    assert same_bits(streamload.load_state_dict(path)["w"], torch.arange(9.0))


def test_iterating_many_tensors_reads_the_header_once(tmp_path, monkeypatch):
    import safetensors

    path = write(tmp_path / "x.safetensors", {f"t{i}": torch.ones(1) for i in range(50)})
    opened = []
    inner = safetensors.safe_open
    monkeypatch.setattr(
        safetensors, "safe_open", lambda *a, **k: (opened.append(a), inner(*a, **k))[1]
    )
    assert len(list(streamload.iter_tensors(path))) == 50
    assert len(opened) == 1
    assert threading.active_count() == 1


def test_a_mapping_is_private(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": torch.arange(4.0)})
    before = Path(path).read_bytes()
    with streamload.open_checkpoint(path) as source:
        view = source.mapped("w")
        view.fill_(7)
    assert Path(path).read_bytes() == before
    assert streamload.load_state_dict(path)["w"].tolist() == [0, 1, 2, 3]
