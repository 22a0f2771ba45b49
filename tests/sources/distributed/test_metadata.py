"""``.metadata``: what torch of any version writes is read; all else is refused, nothing is run."""

from __future__ import annotations

import copyreg
import fractions
import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

import streamload
from streamload.core.errors import CheckpointError

Change = Callable[[Metadata], object]


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "pieces-2", tmp_path / "copy")
    return tmp_path / "copy"


def metadata(folder: Path) -> Metadata:
    with open(folder / ".metadata", "rb") as file:
        found: Metadata = pickle.load(file)
    return found


def write(folder: Path, value: object, protocol: int = 4) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value, protocol=protocol))


def of(name: str) -> Callable[[Metadata], Any]:
    return lambda found: found.state_dict_metadata[f"model.{name}"]


def at(found: Metadata, name: str, *offset: int) -> MetadataIndex:
    return MetadataIndex(f"model.{name}", torch.Size(offset))


def _chunk(name: str, number: int, offsets: Any, sizes: Any) -> Change:
    def change(found: Metadata) -> None:
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        of(name)(found).chunks[number] = box

    return change


def _stored(name: str, place: tuple[int, ...], /, **fields: Any) -> Change:
    def change(found: Metadata) -> None:
        assert found.storage_data is not None
        for field, value in fields.items():
            setattr(found.storage_data[at(found, name, *place)], field, value)

    return change


def _set(**fields: Any) -> Change:
    return lambda found: [setattr(found, name, value) for name, value in fields.items()]


def _reshaped(found: Metadata) -> None:
    of("plain.float32")(found).size = torch.Size((4, 3))
    _chunk("plain.float32", 0, (0, 0), (4, 3))(found)


def _swapped(found: Metadata) -> None:
    """The two halves of a tensor, of different sizes, each under the other's place."""
    stored = found.storage_data
    one, two = (at(found, "uneven.float32", row, 0) for row in (0, 3))
    stored[one], stored[two] = stored[two], stored[one]


def _doubled(found: Metadata) -> None:
    stored = found.storage_data
    stored[at(found, "bias.float32", 4)] = stored[at(found, "bias.float32", 0)]  # type: ignore[index]


def _nested(found: Metadata) -> None:
    """Something lies under the name of a value."""
    found.state_dict_metadata["step.x"] = of("steps")(found)
    found.planner_data["step.x"] = ("step", "x")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch proof-that-it-ran",)


class _Attribute:
    def __reduce__(self) -> Any:
        return getattr, (fractions.Fraction, "from_float")


FAULTS: dict[str, tuple[Change, str]] = {
    "a piece that is missing": (
        lambda m: of("grid.float32")(m).chunks.pop(), "grid.float32': its 1 pieces lack 48 of 96"),
    "pieces that overlap": (
        _chunk("rows.float32", 1, (5, 0), (7, 6)), "the pieces [0:6, 0:6] and [5:12, 0:6] overlap"),
    "a piece beyond the shape": (
        _chunk("rows.float32", 1, (6, 0), (7, 6)), "reaches out of the shape [12, 6]"),
    "a piece of more dimensions": (
        _chunk("rows.float32", 1, (6, 0, 0), (6, 6, 1)), "3 dimensions, the tensor 2"),
    "a piece of another shape": (
        _reshaped, "plain.float32': its piece [0:4, 0:3] has shape [3, 4] of float32, expected"),
    "pieces under each other's place": (
        _swapped, "uneven.float32': its piece [0:3, 0:3] has shape [2, 3]"),
    "another element type": (
        lambda m: setattr(of("rows.float32")(m).properties, "dtype", torch.float16),
        "shape [6, 6] of float32, expected [6, 6] of float16"),
    "a type there is no table for": (
        lambda m: setattr(of("rows.float32")(m).properties, "dtype", torch.complex32), "complex32"),
    "a layout": (
        lambda m: setattr(of("rows.float32")(m).properties, "layout", torch.sparse_coo),
        "another layout than torch.strided"),
    "a piece that is not stored": (
        lambda m: m.storage_data.pop(at(m, "rows.float32", 6, 0)),  # type: ignore[union-attr]
        "rows.float32': its pieces [6:12, 0:6] are not stored"),
    "a transform": (
        _stored("rows.float32", (6, 0), transform_descriptors=["zstd"]),
        "model.rows.float32' was stored through 'zstd'"),
    "a version": (_set(version="2.0.0"), "its version is '2.0.0', known: '1.0.0'"),
    "a field": (_set(mcore_data={"w": {"shape": 3}}), "'mcore_data'"),
    "a file outside": (
        _stored("rows.float32", (6, 0), relative_path="../x.distcp"), "leads out of the folder"),
    "an absolute path": (
        _stored("rows.float32", (6, 0), relative_path="/etc/passwd"), "leads out of the folder"),
    "a place behind the end": (
        _stored("rows.float32", (6, 0), offset=1 << 40), "cut short"),
    "a place before the beginning": (_stored("rows.float32", (6, 0), offset=-5), "at no place"),
    "a place in the middle": (_stored("rows.float32", (6, 0), offset=7), "__1_0.distcp"),
    "two pieces at one place": (_doubled, "bias.float32': its piece [4:7] is said to be where"),
    "a long file name": (
        _stored("rows.float32", (6, 0), relative_path="x" * 5000), "has 5000 characters"),
    "a length": (_stored("rows.float32", (6, 0), length=100), "rows.float32"),
    "no pieces at all": (_set(storage_data=None), "storage_data is None"),
    "no tensors at all": (_set(state_dict_metadata={}, planner_data={}), "holds no tensors at all"),
    "a class of somebody's": (
        _set(storage_meta=fractions.Fraction(1, 2)), "fractions.Fraction"),
    "a function of somebody's": (_set(planner_data={"x": shutil.copyfile}), "shutil.copyfile"),
    "something that runs": (_set(planner_data=Evil()), "refused as a whole"),
    "something that runs, deep inside": (
        lambda m: of("rows.float32")(m).chunks.append(Evil()), "refused as a whole"),
    "getattr of something else": (
        lambda m: setattr(m, "planner_data", _Attribute()), "fractions.Fraction"),
    "planner data of other names": (
        lambda m: m.planner_data.update({"model.steps": ("optimizer", "steps")}), "other keys"),
    "a value and a dictionary": (_nested, "step"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(folder, fault, monkeypatch):
    monkeypatch.chdir(folder)
    change, words = FAULTS[fault]
    found = metadata(folder)
    change(found)
    write(folder, found)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        streamload.open_checkpoint(folder)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not list(folder.glob("proof*"))


def test_every_tensor_at_fault_is_listed(folder):
    found = metadata(folder)
    for name in ("rows.float32", "columns.bfloat16", "experts.float32"):
        of(name)(found).chunks.pop()
    write(folder, found)
    with pytest.raises(CheckpointError) as caught:
        streamload.open_checkpoint(folder)
    assert len(caught.value.problems) == 3


def test_faults_of_the_optimizer_stop_nothing(folder):
    found = metadata(folder)
    name = "optimizer.state.rows.float32.exp_avg"
    found.state_dict_metadata[name].chunks.clear()  # type: ignore[union-attr]
    write(folder, found)
    assert len(streamload.load_state_dict(folder)) == 29
    with pytest.raises(CheckpointError, match="lack 72 of 72"):
        streamload.load_state_dict(folder, prefix="optimizer")


def test_nothing_but_a_class_of_the_format_is_unpickled(folder):
    """A pickle that is no Metadata at all."""
    for value, words in (([1, 2], "a list"), ({"a": 1}, "a dict"), (None, "None")):
        write(folder, value)
        with pytest.raises(CheckpointError, match=words):
            streamload.open_checkpoint(folder)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_metadata_that_was_cut(folder, share):
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"\.metadata: was cut short"):
        streamload.open_checkpoint(folder)


def test_more_behind_the_end(folder):
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="more than one object"):
        streamload.open_checkpoint(folder)


# --- what ordinary metadata holds, by other versions of torch and of Python --------------------


def _bare(found: Metadata) -> None:
    """As torch up to 2.4 wrote it."""
    del found.storage_meta
    del found.version


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "change",
    [
        _bare,
        _set(mcore_data={}),
        lambda m: setattr(m.storage_meta, "checkpoint_id", pathlib.PureWindowsPath("C:/run")),
        lambda m: setattr(m.storage_meta, "checkpoint_id", "s3://bucket/run"),
        _stored("rows.float32", (6, 0), transform_descriptors=[]),
    ],
)
def test_ordinary_variants_open(folder, change, protocol):
    wanted = streamload.load_state_dict(folder)
    found = metadata(folder)
    change(found)
    write(folder, found, protocol)
    again = streamload.load_state_dict(folder)
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)


def test_an_enumeration_by_name(folder):
    """Some releases of Python 3.11 pickle a member of an enumeration by ``getattr``."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=4)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[_MEM_FORMAT_ENCODING] = lambda kind: (getattr, (type(kind), kind.name))
    pickler.dump(metadata(folder))
    assert b"getattr" in stream.getvalue()
    (folder / ".metadata").write_bytes(stream.getvalue())
    assert len(streamload.load_state_dict(folder)) == 29


def test_properties_of_torch_before_2_3(folder):
    """Then they were a class of the module for sharded tensors."""
    data = pickle.dumps(metadata(folder), protocol=2)
    old, new = (
        "torch.distributed._shard.sharded_tensor.metadata",
        "torch.distributed.checkpoint.metadata",
    )
    for name, before in (
        ("TensorProperties",) * 2,
        ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
    ):
        written = f"c{new}\n{name}\n".encode()
        assert written in data
        data = data.replace(written, f"c{old}\n{before}\n".encode())
    (folder / ".metadata").write_bytes(data)
    assert len(streamload.load_state_dict(folder)) == 29
