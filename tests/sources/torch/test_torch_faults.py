"""Torch files that are damaged, hostile or of another kind: one error with the path, no effect."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import random
import struct
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, ReadError
from streamload.sources.torch.legacy_format import LEGACY_START
from streamload.sources.torch.torch_files import open_torch
from tests.support.counting import work_done

W = torch.arange(6.0).reshape(2, 3)
STATE = {"w": W, "b": torch.tensor([0.5, -0.5])}


def saved(content: object, *, old: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not old)
    return stream.getvalue()


def refuse(path: Path | str, *words: str) -> CheckpointError:
    """The path must be refused in words that name it, and no file may stay open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        open_torch([str(path)], given=str(path))
    assert set(os.listdir("/proc/self/fd")) == before
    text = str(caught.value)
    assert str(path) in text
    for word in words:
        assert word in text, text
    assert "weights_only" not in text  # torch's advice to switch the safety off
    return caught.value


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """A torch archive with a pickle made by hand."""
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x/data.pkl", pickled)
        out.writestr("x/version", "3\n")
        for key, data in (storages or {}).items():
            out.writestr(f"x/data/{key}", data)
    return path


def legacy(path: Path, pickled: bytes) -> Path:
    """The format before zip with a pickle made by hand and no storages."""
    head = pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    path.write_bytes(LEGACY_START + head + pickled + pickle.dumps([], 2))
    return path


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


class Boom:
    """Makes a folder when an unpickler runs it."""

    def __init__(self, where: Path) -> None:
        self.where = str(where)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.where,)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.parametrize("name", ["x.bin", "x.safetensors"])
@pytest.mark.parametrize("place", ["beside", "optimizer", "inside", "key"])
def test_code_is_refused_by_name_and_never_run(
    tmp_path: Path, place: str, name: str, old: bool
) -> None:
    boom = Boom(tmp_path / "RAN")
    content = {
        "beside": {**STATE, "x": boom},
        "optimizer": {"model": STATE, "optimizer": boom},
        "inside": {"model": {**STATE, "x": [(boom,)]}},
        "key": {**STATE, "x": {boom: 1}},
    }[place]
    path = tmp_path / name
    path.write_bytes(saved(content, old=old))
    refuse(path, "posix.mkdir")
    assert not (tmp_path / "RAN").exists()


def hostile_calls(target: str) -> dict[str, bytes]:
    """Pickles that reach ``os.mkdir(target)`` by other opcodes than REDUCE, or through torch."""
    arg = text(target)
    mkdir = b"cposix\nmkdir\n"
    return {
        "INST": b"(" + arg + b"iposix\nmkdir\n.",
        "OBJ": b"(" + mkdir + arg + b"o.",
        "NEWOBJ": mkdir + arg + b"\x85\x81.",
        "STACK_GLOBAL": b"\x8c\x05posix\x8c\x05mkdir\x93" + arg + b"\x85R.",
        "from type": b"ctorch._tensor\n_rebuild_from_type_v2\n("
        + mkdir
        + b"ctorch\nTensor\n"
        + arg
        + b"\x85}tR.",
        "nested": b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n"
        b"_rebuild_from_type_v2\nctorch\nTensor\n)}tR.",
        "EXT": b"\x82\x01.",
        "BUILD": b"ctorch\nTensor\n}" + text("__setstate__") + mkdir + b"sb.",
        "setstate of a tensor type": b"ctorch\nTensor\n" + arg + b"\x85R.",
        "a dtype called": b"ctorch\nfloat32\n" + arg + b"\x85R.",
        "persistent id": arg + b"Q.",
        "persistent id of a module": b"(" + text("module") + mkdir + b"NNtQ.",
    }


@pytest.mark.parametrize("case", hostile_calls(""))
def test_every_way_to_a_call_is_refused(tmp_path: Path, case: str) -> None:
    pickled = b"\x80\x02" + hostile_calls(str(tmp_path / "RAN"))[case]
    refuse(archive(tmp_path / "x.pt", pickled))
    refuse(legacy(tmp_path / "y.pt", pickled))
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "__builtin__ getattr",
        "torch load",
        "torch.serialization load",
        "torch.hub load",
        "torch._utils _import_dotted_name",
        "torch._tensor Tensor.__reduce_ex__",
        "torch.storage _load_from_bytes",
        "functools partial",
        "numpy.core.multiarray scalar",
        "torch " + "a" * 5000,
    ],
)
def test_a_global_outside_the_list_is_refused_by_name(tmp_path: Path, name: str) -> None:
    module, attribute = name.split(" ")
    pickled = f"\x80\x02c{module}\n{attribute}\n.".encode("latin-1")
    error = refuse(archive(tmp_path / "x.pt", pickled), attribute[:150])
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"args": argparse.Namespace(lr=0.1)}, "argparse.Namespace"),
        ({"w": np.arange(3.0)}, "numpy"),
        ({"where": pathlib.PurePosixPath("x")}, "pathlib"),
        ({"model": nn.Linear(2, 2)}, "torch.nn.modules.linear.Linear"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_objects_instead_of_weights_are_refused_with_a_way_out(
    tmp_path: Path, content: object, word: str, old: bool
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(saved(content, old=old))
    refuse(path, word, "state_dict()")


def plain_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        out.writestr("hello.txt", "hi")
    return stream.getvalue()


def script() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py", "version"):
            out.writestr(f"x/{name}", b"\x80\x02}.")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-lfs pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\n  <html>", "web page"),
        (plain_zip(), "hello.txt"),
        (script(), "TorchScript"),
        (struct.pack("<Q", 2) + b"{}", "safetensors"),
        (pickle.dumps({"a": 1}), "plain pickle"),
        (b"hello", "torch.save"),
        (b"PK\3\4", "cut short"),
        (LEGACY_START, "cut short"),
        (LEGACY_START[:-1], "plain pickle"),
    ],
)
def test_files_of_another_kind_are_named_in_words(tmp_path: Path, data: bytes, word: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    refuse(path, word)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    refuse(tmp_path, "folder")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "not a regular file")
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        open_torch([str(tmp_path / "absent.bin")], given="")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
def test_a_cut_anywhere_is_refused(tmp_path: Path, old: bool) -> None:
    data = saved(STATE, old=old)
    path = tmp_path / "x.bin"
    for size in range(0, len(data), 1 if old else 13):
        path.write_bytes(data[:size])
        refuse(path)


def flipped(data: bytes, positions: list[int], count: int) -> list[bytes]:
    chooser = random.Random(20)
    results = []
    for _ in range(count):
        changed = bytearray(data)
        changed[chooser.choice(positions)] ^= 1 << chooser.randrange(8)
        results.append(bytes(changed))
    return results


def test_flipped_bits_give_exact_values_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    data = saved({"model": STATE, "t": W.t(), "epoch": 3, "s": torch.arange(5)[::2]})
    path.write_bytes(data)
    values = {at for start in (W.numpy().tobytes(), STATE["b"].numpy().tobytes())
              for at in range(data.index(start), data.index(start) + len(start))}  # fmt: skip
    spots = [at for at in range(len(data)) if at not in values]
    texts: list[str] = []
    for changed in flipped(data, spots, 600):
        path.write_bytes(changed)
        try:
            with open_torch([str(path)], given="") as source:
                for name, value in STATE.items():
                    assert torch.equal(source.tensor(name), value)
        except (CheckpointError, ReadError) as error:
            texts.append(str(error))
    assert all(str(path) in text for text in texts)
    assert 100 < len(texts) < 600


def test_flipped_bits_of_the_old_format_never_raise_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    data = saved({"model": STATE, "epoch": 3}, old=True)
    texts: list[str] = []
    for changed in flipped(data, list(range(len(data))), 600):
        path.write_bytes(changed)
        try:
            with open_torch([str(path)], given="") as source:
                for name, spec in source.catalog.items():
                    if spec.nbytes < 1 << 20:
                        source.tensor(name)
        except (CheckpointError, ReadError) as error:
            texts.append(str(error))
    assert all(str(path) in text for text in texts)
    assert len(texts) > 100


def storage(numel: int, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return (
        b"("
        + text("storage")
        + f"ctorch\n{kind}\n".encode()
        + text(key)
        + text("cpu")
        + b"J"
        + struct.pack("<i", numel)
        + b"tQ"
    )


def tensor(stored: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", v) for v in values) + b"t"

    number = b"J" + struct.pack("<i", offset)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + stored
        + number
        + numbers(shape)
        + numbers(strides)
        + b"\x89}tR"
    )


BIG = 1 << 62
TENSORS = {
    "larger than its storage": (tensor(storage(4), 0, (5,), (1,)), "ends at byte 20"),
    "offset past the end": (tensor(storage(4), 3, (2,), (1,)), "ends at byte 20"),
    "strides past the end": (tensor(storage(4), 0, (2, 2), (3, 1)), "ends at byte 20"),
    "negative offset": (tensor(storage(4), -1, (2,), (1,)), "wrong form"),
    "negative size": (tensor(storage(4), 0, (-2,), (1,)), "sizes"),
    "negative stride": (tensor(storage(4), 3, (2,), (-1,)), "sizes"),
    "sizes that wrap around": (tensor(storage(4), 0, (BIG, BIG, 4), (0, 0, 1)), "absurd"),
    "more sizes than strides": (tensor(storage(4), 0, (2, 2), (1,)), "strides"),
    "storage of another length": (tensor(storage(5), 0, (4,), (1,)), "has 16 bytes, expected 20"),
    "storage of another type": (tensor(storage(4, "0", "HalfStorage"), 0, (4,), (1,)), "16 bytes"),
    "absent storage": (tensor(storage(4, "7"), 0, (4,), (1,)), "'7' is not in the file"),
    "storage outside data/": (tensor(storage(4, "../data.pkl"), 0, (4,), (1,)), "not in the file"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_contradict_their_storage(tmp_path: Path, case: str) -> None:
    record, word = TENSORS[case]
    pickled = b"\x80\x02}" + text("w") + record + b"s."
    refuse(archive(tmp_path / "x.pt", pickled, {"0": bytes(16)}), word)


def test_the_record_made_by_hand_is_read_when_it_is_right(tmp_path: Path) -> None:
    """So that the refusals above are for their own reason."""
    pickled = b"\x80\x02}" + text("w") + tensor(storage(4), 1, (3,), (1,)) + b"s."
    path = str(archive(tmp_path / "x.pt", pickled, {"0": np.arange(4, dtype="f4").tobytes()}))
    with open_torch([path], given=path) as source:
        assert source.tensor("w").tolist() == [1.0, 2.0, 3.0]


def test_ordered_dictionaries_as_python_2_pickled_them(tmp_path: Path) -> None:
    pairs = b"](]" + text("w") + b"a" + tensor(storage(4), 0, (4,), (1,)) + b"ae"
    pickled = b"\x80\x02ccollections\nOrderedDict\n" + pairs + b"\x85R."
    path = str(archive(tmp_path / "x.pt", pickled, {"0": bytes(16)}))
    with open_torch([path], given=path) as source:
        assert source.tensor("w").tolist() == [0.0] * 4


def nested_dicts(depth: int) -> bytes:
    """Each dictionary holds the next one twice: 2 ** depth names from a few hundred bytes."""
    result = b"}" + text("a") + tensor(storage(4), 0, (4,), (1,)) + b"s"
    for level in range(depth):
        slot = bytes([level])
        result += b"q" + slot + b"0}" + text("a") + b"h" + slot + b"s" + text("b") + b"h" + slot
        result += b"s"
    return result


BOMBS = {
    "deep lists": b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep tuples": b")" + b"\x85" * 200_000 + b".",
    "deep tuple as a key": b"}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "deep dictionaries": b"}" + (text("a") + b"}") * 50_000 + b"s" * 50_000 + b".",
    "a dictionary within itself": b"}q\x00" + text("a") + b"h\x00s.",
    "a list within itself": b"]q\x00h\x00a.",
    "many names from few bytes": nested_dicts(60) + b".",
    "memo at a huge index": b"K\x01r\xff\xff\xff\xff.",
    "a huge string that is not there": b"\x8d" + b"\xff" * 7 + b"\x7f.",
    "huge bytes that are not there": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "a huge number": b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "a huge number as a key": b"}\x8b\x00\x00\x01\x00" + b"\x7f" * (1 << 16)
    + tensor(storage(4), 0, (4,), (1,)) + b"s.",
    "deep calls of what is not known": b"cx\ny\n" + b")R" * 100_000 + b".",
    "deep keys of what is not known": b"cx\ny\n" + b"}\x86\x85R" * 50_000 + b".",
    "an unknown object within itself": b"cx\ny\n)Rq\x00h\x00b.",
    "a class without a name": b"c\n\n)R.",
    "named arguments of a known class": b"ccollections\nOrderedDict\n)}\x92.",
    "an old object of nothing": b"(o.",
    "a frame that is not there": b"\x95" + b"\xff" * 8 + b".",
    "nothing on the stack": b".",
    "pop from nothing": b"0.",
    "no mark": b"t.",
    "no memo": b"h\x05.",
    "items for a number": b"K\x01K\x02K\x03s.",
    "append to a tensor": tensor(storage(4), 0, (4,), (1,)) + b"K\x01a.",
    "half a pair": b"}(" + text("a") + b"u.",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff.",
    "a call of a number": b"K\x01)R.",
    "a call with no tuple": b"ctorch\nSize\nK\x01R.",
    "a storage without parts": b"(" + text("storage") + b"tQ.",
    "a shape of text": b"ctorch\nSize\n" + text("ab") + b"\x85R.",
    "an unknown opcode": b"\xff.",
    "no stop": b"}",
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_and_nonsense_are_refused_quickly(tmp_path: Path, case: str) -> None:
    pickled = b"\x80\x02" + BOMBS[case]
    paths = [archive(tmp_path / "x.pt", pickled, {"0": bytes(16)})]
    if b"Q" not in pickled:
        paths.append(legacy(tmp_path / "y.pt", pickled))
    started = time.process_time()
    errors = [refuse(path) for path in paths]
    assert time.process_time() - started < 5.0
    assert len(str(errors[0])) < 1000
    with work_done() as work:
        for path in paths:
            refuse(path)
    assert work.bytes_read < 16 * len(pickled) + 4096
    assert work.peak_bytes < 64 << 20


def test_a_pickle_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as out, out.open("x/data.pkl", "w") as record:
        for _ in range(65):
            record.write(bytes(1 << 20))
    started = time.process_time()
    with work_done() as work:
        refuse(path, "limit")
    assert work.bytes_read < 1 << 20
    assert time.process_time() - started < 1.0


def test_archives_that_torch_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    pickled = b"\x80\x02}" + text("w") + tensor(storage(4), 0, (4,), (1,)) + b"s."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("x/data.pkl", pickled)
        out.writestr("x/data/0", bytes(16))
    refuse(path, "version")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as out:
        out.writestr("x/data.pkl", pickled)
    refuse(path, "compressed by method 12")
    archive(path, pickled, {"0": bytes(16)})
    data = path.read_bytes()
    for name, word in ((b"x/data/0", b"x/data/1"), (b"x/data.pkl", b"x/data.pkk")):
        path.write_bytes(data[: data.rindex(name)] + data[data.rindex(name) :].replace(name, word))
        refuse(path)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x/data.pkl", pickled)
        with pytest.warns(UserWarning, match="Duplicate"):
            out.writestr("x/data.pkl", pickled)
    refuse(path, "twice")
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x/data.pkl", pickled)
        out.writestr("y/data.pkl", pickled)
    refuse(path)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x/data.pkl", pickled)
        out.writestr("x/byteorder", "middle")
        out.writestr("x/data/0", bytes(16))
    refuse(path, "byte order")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_of_kinds_that_are_not_read_are_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = {
        "ok": W,
        "coo": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "half complex": torch.zeros(2, dtype=torch.complex32),
        "eight bits": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8),
    }
    path.write_bytes(saved(content))
    error = refuse(path, "'coo' is sparse", "'meta'", "complex32", "quantised")
    assert len(error.problems) == 4
    # Beside the weights they do no harm.
    path.write_bytes(saved({"model": STATE, "optimizer": content}))
    with open_torch([str(path)], given="") as source:
        assert set(source.catalog) == {"w", "b"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (W, ["bare tensor"]),
        ([W], ["a list"]),
        (None, ["nothing"]),
        (3, ["a int"]),
        ({0: W}, ["0", "no name"]),
        ({"model": {("a", 1): W}}, ["no name"]),
        ({0: {"w": W}}, ["no name"]),
        ({"model": STATE, "state_dict": {"w": W + 1}}, ["'model'", "'state_dict'"]),
        ({"model": STATE, "module": {"w": W}}, ["'model'", "'module'"]),
        ({"ema": STATE}, ["'ema'"]),
        ({"optimizer": {"state": {"w": W}}, "epoch": 3}, ["'optimizer'"]),
        ({"a.b": W, "a": {"b": W}}, ["'a.b'"]),
    ],
)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
def test_no_state_dict_can_be_made_out(
    tmp_path: Path, content: object, words: list[str], old: bool
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(saved(content, old=old))
    refuse(path, *words)


def test_checksums_tell_a_flipped_value(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = saved(STATE)
    at = data.index(W.numpy().tobytes())
    for content, good in ((data, True), (data[: at + 4] + b"\xff" + data[at + 5 :], False)):
        path.write_bytes(content)
        with open_torch([str(path)], given="") as source:
            read = {extent: bytearray(extent.nbytes) for extent in source.checksums}
            for extent, buffer in read.items():
                source.read_into(extent, memoryview(buffer))
            found = {extent: zlib.crc32(buffer) for extent, buffer in read.items()}
            assert len(found) == 2
            assert (found == source.checksums) is good


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(saved({"w": torch.ones(4096)}))
    with open_torch([str(path)], given="") as source:
        source.check_unchanged()
        os.truncate(path, 4096)
        with pytest.raises(ReadError, match="ended early"):
            source.tensor("w")
        with pytest.raises(ReadError, match="changed"):
            source.check_unchanged()


def test_odd_names_and_paths_print(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9 \n.pt")
    path.write_bytes(saved({"model": STATE, "\ud800 \n é": 1, "n" * 9999: 2}))
    with open_torch([str(path)], given="") as source:
        (notice,) = source.catalog.notices
        assert len(notice.encode()) < 1000
        assert "\n" not in notice
        assert torch.equal(source.tensor("w"), W)
