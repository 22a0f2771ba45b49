"""Where tensors lie in new files: headers that our own strict reader and the reference accept."""

from __future__ import annotations

import json

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import contiguous_strides, numel
from streamload.planning.records import PlannedTensor
from streamload.saving import file_layout as files
from streamload.saving.file_layout import index_text, lay_out
from streamload.sources.files import OpenFile
from streamload.sources.safetensors.header import read_header

DTYPES = [n for n, d in BY_NAME.items() if d.torch_name and n not in ("C128",) and "FNUZ" not in n]


def planned(name, shape, dtype="F32"):
    shape = tuple(shape)
    return PlannedTensor(name, (), ("s",), shape, contiguous_strides(shape), dtype, dtype, ())


TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8
).map(lambda made: [planned(f"t{i}", shape, dtype) for i, (dtype, shape) in enumerate(made)])


@given(tensors=TENSORS, most=st.none() | st.integers(1, 500))
def test_every_reader_accepts_the_layout(tmp_path_factory, tensors, most):
    made = lay_out(tensors, "model.safetensors", max_shard_bytes=most)
    assert sorted(n for file in made for n in file.offsets) == sorted(t.name for t in tensors)
    sizes = {t.name: t for t in tensors}
    for file in made:
        path = tmp_path_factory.getbasetemp() / "laid_out.safetensors"
        path.write_bytes(file.header + bytes(file.nbytes - len(file.header)))
        opened = OpenFile(str(path))
        catalog = read_header(opened)
        opened.close()
        for name, spec in catalog.items():
            assert (spec.shape, spec.dtype) == (sizes[name].shape, sizes[name].dtype)
            assert spec.extent.offset == file.offsets[name]
            assert spec.extent.offset % BY_NAME[spec.dtype].itemsize == 0, "aligned: can be mapped"
        with safetensors.safe_open(path, framework="pt") as reference:
            assert set(reference.keys()) == set(file.offsets)
            assert reference.metadata() == {"format": "pt"}
        held = [sizes[n] for n in file.offsets]
        if most is not None and len(held) > 1:
            assert sum(t.nbytes for t in held) <= most


def test_shards_are_numbered_and_told_apart():
    tensors = [planned(f"t{i}", (4,)) for i in range(3)]
    made = lay_out(tensors, "model.safetensors", max_shard_bytes=16, token="ab")
    assert [f.name for f in made] == [f"model-ab-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads(index_text(made))
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {f"t{i}": made[i].name for i in range(3)},
    }


def test_one_file_keeps_its_name_and_order():
    tensors = [planned("z", (2,)), planned("a", (3,))]
    (file,) = lay_out(tensors, "x.safetensors", max_shard_bytes=1000)
    assert (file.name, list(file.offsets)) == ("x.safetensors", ["z", "a"])
    assert file.nbytes == len(file.header) + 4 * sum(numel(t.shape) for t in tensors)
    assert len(file.header) % 64 == 0


def test_a_header_over_the_formats_limit_is_refused(monkeypatch):
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ValueError, match="the header of x"):
        lay_out([planned("n" * 100, (1,))], "x", max_shard_bytes=None)
