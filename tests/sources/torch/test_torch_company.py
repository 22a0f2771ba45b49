"""Pickles with company: what stands beside plain weights, and is never made or called."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import io
import operator
import pathlib
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import streamload
from streamload.core.errors import CheckpointError
from streamload.sources.torch.denied_globals import is_denied
from streamload.sources.torch.torch_files import open_torch

W = torch.arange(6.0).reshape(2, 3)
STATE = {"w": W, "turned": W.t(), "steps": torch.arange(7)[::2]}


class Attributes(dict):  # type: ignore[type-arg]
    """As Lightning's AttributeDict."""


class Colour(enum.Enum):
    RED = 1


class Named:
    """Its pickle has named arguments (NEWOBJ_EX)."""

    def __new__(cls, *, size: int = 0) -> Named:
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": self.size}

    size: int


class Own(torch.Tensor):
    """A tensor of a class of one's own."""


def cyclic() -> argparse.Namespace:
    made = argparse.Namespace()
    made.itself = [made]
    return made


COMPANY = {
    "argparse.Namespace": argparse.Namespace(lr=0.1),
    "pathlib": pathlib.PurePosixPath("x"),
    "Attributes": Attributes(lr=0.1),
    "Colour": {Colour.RED: 1},
    "Named": Named(size=3),
    "numpy.dtype": np.float64(0.25),
    "array of numpy": np.arange(3.0),
    "datetime.datetime": datetime.datetime(2020, 1, 1),
    "collections.deque": collections.deque([1]),
    "random.Random": random.Random(1),
    "torch.optim.adam.Adam": torch.optim.Adam,
    "torch.nn.functional.relu": nn.functional.relu,
    "torch.nn.modules.linear.Linear": nn.Linear(2, 2),
    "a range": range(3),
    "cyclic Namespace": cyclic(),
    "Own": Own(2),
}


def save(path: Path, content: object, *, old: bool = False, protocol: int = 2) -> str:
    torch.save(content, path, _use_new_zipfile_serialization=not old, pickle_protocol=protocol)
    return str(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_weights_are_read_and_company_is_listed(tmp_path: Path, old: bool, protocol: int) -> None:
    for word, value in COMPANY.items():
        if word == "Named" and protocol < 4:  # pickled with functools.partial, which is refused
            continue
        path = save(tmp_path / "x.ckpt", {"model": STATE, "it": value}, old=old, protocol=protocol)
        with open_torch([path], given=path) as source:
            assert list(source.catalog) == list(STATE)
            assert all(torch.equal(source.tensor(name), STATE[name]) for name in STATE)
            notices = " ".join(source.catalog.notices)
        assert word.split()[-1] in notices or word == "Own"
        assert "'it'" in notices


def test_nothing_is_imported_or_called(tmp_path: Path) -> None:
    (tmp_path / "company.py").write_text("class Made:\n    pass\n")
    make = "import company, torch; torch.save({'model': {'w': torch.ones(2)}, 'x': company.Made()},"
    read = "import sys, streamload; s = streamload.open_checkpoint('x.pt');"
    for code in (f"{make} 'x.pt')", f"{read} assert 'company' not in sys.modules"):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"w": W, "own": Own(2)}, ["'own'", "Own"]),
        ({"w": W, "list": argparse.Namespace(t=[W])}, ["'list'", "argparse.Namespace"]),
        ({"model": nn.Linear(2, 2)}, ["'model'", "torch.nn.modules.linear.Linear"]),
        ({"model": {"w": W, "part": nn.Linear(2, 2)}}, ["'part'"]),
        ({"state_dict": Attributes(w=W)}, ["'state_dict'", "Attributes"]),
        ({"w": np.arange(3.0)}, ["numpy"]),
        (nn.Linear(2, 2), ["whole pickled object", "torch.nn.modules.linear.Linear"]),
        (argparse.Namespace(w=W), ["argparse.Namespace"]),
    ],
)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_unknown_classes_in_the_weights_are_refused_by_name(
    tmp_path: Path, content: object, words: list[str], old: bool
) -> None:
    path = save(tmp_path / "x.pt", content, old=old)
    with pytest.raises(CheckpointError) as caught:
        open_torch([path], given=path)
    for word in (*words, "state_dict()", path):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [print, functools.partial(print), operator.itemgetter(1), subprocess.PIPE and subprocess.run,
     getattr, eval, open, torch.load, io.open, np.load, pathlib.Path.unlink, sys.exit],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_can_run_something_is_refused_beside_the_weights_too(
    tmp_path: Path, value: object, protocol: int
) -> None:
    if value is print:  # harmless: a name, which is not called
        path = save(tmp_path / "x.pt", {"model": STATE, "x": value}, protocol=protocol)
        open_torch([path], given=path).close()
        return
    path = save(tmp_path / "x.pt", {"model": STATE, "x": [{"y": value}]}, protocol=protocol)
    with pytest.raises(CheckpointError, match=r"it names \w"):
        open_torch([path], given=path)


@pytest.mark.parametrize(
    "name",
    """os.system posix.system nt.system os.path.join subprocess.Popen runpy.run_path builtins.eval
    builtins.exec builtins.compile builtins.__import__ builtins.getattr builtins.open sys.exit
    shutil.rmtree socket.socket importlib.import_module ctypes.CDLL code.InteractiveConsole
    pty.spawn webbrowser.open operator.attrgetter operator.methodcaller _operator.attrgetter
    functools.partial torch.load torch.hub.load torch.jit.load torch.serialization._load
    torch.storage._load_from_bytes torch.hub.load_state_dict_from_url pickle.loads _pickle.loads
    dill.loads cloudpickle.loads joblib.load numpy.load numpy.memmap types.FunctionType
    types.CodeType yaml.unsafe_load transformers.AutoModel.from_pretrained any.Class.__reduce__
    any.__class__.__base__ keras.models.load_model PIL.Image.open
    torch.fx.graph_module.reduce_graph_module copyreg.add_extension multiprocessing.Process
    asyncio.run timeit.timeit pdb.run torch.utils.cpp_extension.load_inline""".split(),  # noqa: SIM905
)
def test_the_table_of_what_can_run_something(name: str) -> None:
    parts = name.split(".")
    # Where a module ends and a name begins is the file's choice.
    assert any(is_denied(".".join(parts[:at]), ".".join(parts[at:])) for at in range(1, len(parts)))


@pytest.mark.parametrize(
    "name",
    """argparse.Namespace pathlib.PosixPath numpy._core.multiarray.scalar numpy.dtype copy.Uploader
    collections.deque types.SimpleNamespace lightning.fabric.utilities.data.AttributeDict
    omegaconf.dictconfig.DictConfig copyreg._reconstructor re._compile enum.EnumType
    torch.nn.functional.relu torch.optim.adam.Adam numpy.random._pickle.__randomstate_ctor
    my.opener.Opener datetime.datetime logging.getLogger""".split(),  # noqa: SIM905
)
def test_names_that_only_stand_beside(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert not is_denied(module, last)


def deflated(path: str, folder: Path) -> str:
    made = folder / "deflated.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return str(made)


def test_deflated_archives_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    content = {**STATE, "empty": torch.empty(0), "many": torch.zeros(5000), "half": W.half()}
    path = deflated(save(tmp_path / "x.pt", content), tmp_path)
    judge = torch.load(path, weights_only=True)
    found = streamload.load_state_dict(path)
    assert all(torch.equal(found[name], judge[name]) for name in content)
    with streamload.open_checkpoint(path) as source:
        assert any("compressed" in notice for notice in source.catalog.notices)
        assert all(spec.extent is None for spec in source.catalog.values())


def test_damaged_compressed_bytes_are_an_error(tmp_path: Path) -> None:
    path = Path(deflated(save(tmp_path / "x.pt", {"w": torch.arange(999.0)}), tmp_path))
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("x/data/0")
    for at in range(info.header_offset + 60, info.header_offset + info.compress_size, 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=str(path)):
            streamload.load_state_dict(path)


OTHER = {name: value + 1 for name, value in STATE.items()}


@pytest.mark.parametrize(
    "key", ["params", "params_ema", "net", "network", "weights", "model_state", "teacher"]
)
def test_one_clear_candidate_is_taken(tmp_path: Path, key: str) -> None:
    path = save(
        tmp_path / "x.pth", {key: STATE, "epoch": 3, "optimizerG": {"state": {0: {"m": W}}}}
    )
    found = streamload.load_state_dict(path)
    assert list(found) == list(STATE)


@pytest.mark.parametrize("other", ["ema", "state_dict_ema", "params_ema", "model_ema"])
def test_an_average_is_taken_by_its_prefix_alone(tmp_path: Path, other: str) -> None:
    path = save(tmp_path / "x.pth", {"params": STATE, other: OTHER})
    assert torch.equal(streamload.load_state_dict(path)["w"], W)
    assert torch.equal(streamload.load_state_dict(path, prefix=other)["w"], W + 1)
    with streamload.open_checkpoint(path) as source:
        assert any(f"prefix={other!r}" in notice for notice in source.catalog.notices)


@pytest.mark.parametrize("pair", [("generator", "discriminator"), ("student", "teacher")])
def test_two_halves_keep_their_names_and_prefix_takes_one(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    one, two = pair
    path = save(tmp_path / "x.pth", {one: OTHER, two: STATE, "epoch": 3})
    with streamload.open_checkpoint(path) as source:
        assert f"{two}.w" in source.catalog
        assert any(f"prefix={two!r}" in notice for notice in source.catalog.notices)
    assert torch.equal(streamload.load_state_dict(path, prefix=two)["w"], W)
    assert torch.equal(streamload.load_state_dict(path, prefix=one)["w"], W + 1)


def test_two_that_differ_are_refused_with_both_ways(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pth", {"model": STATE, "state_dict": OTHER})
    with pytest.raises(CheckpointError, match="prefix='state_dict' or prefix='model'"):
        streamload.open_checkpoint(path)
    assert torch.equal(streamload.load_state_dict(path, prefix="model")["w"], W)
    assert torch.equal(dict(streamload.iter_tensors(path, prefix="state_dict"))["w"], W + 1)


def test_an_average_by_itself_names_its_prefix(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pth", {"ema_model": STATE, "epoch": 3})
    with pytest.raises(CheckpointError, match="prefix='ema_model'"):
        streamload.open_checkpoint(path)
    assert torch.equal(streamload.load_state_dict(path, prefix="ema_model")["w"], W)
