"""``get_extra_state`` and ``set_extra_state``: set with the commit, taken back, exported."""

import io
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import streamload


class Amax(nn.Linear):
    """Keeps a number beside its tensors."""

    amax = 1.0

    def get_extra_state(self):
        return torch.tensor([self.amax])

    def set_extra_state(self, state):
        self.amax = float(state[0])


class Keeping(nn.Module):
    """Takes whatever it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.state = None

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Failing(Amax):
    """Raises when half of it is set."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = [1]
        self.deep = [{"a": 1}]

    def get_extra_state(self):
        return torch.tensor([self.amax, self.deep[0]["a"]])

    def set_extra_state(self, state):
        super().set_extra_state(state)
        self.seen.append(2)
        self.deep[0]["a"] = int(state[-1])
        self.more = True
        if self.amax == 7.5:
            raise ValueError("not this one")


def build(kind=Amax):
    return nn.Sequential(kind(2, 3), nn.Sequential(Amax(3, 2)))


def stored():
    module = build()
    module[0].amax, module[1][0].amax = 3.25, 7.5
    return module.state_dict()


def write(tensors, path, kind):
    if kind == "pt":
        torch.save(tensors, path / "m.pt")
        return path / "m.pt"
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, path / "m.safetensors")
    return path / "m.safetensors"


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_extra_states_are_set(tmp_path, kind, wrapper):
    path = write({wrapper + k: v for k, v in stored().items()}, tmp_path, kind)
    with streamload.empty_weights():
        empty = build()
    for module in (build(), empty):
        assert streamload.plan(module, path).ok
        assert module[0].amax == 1.0
        report = streamload.load_into(module, path, dtype=None)
        assert (module[0].amax, module[1][0].amax) == (3.25, 7.5)
        assert not report.unexpected
        assert not report.missing
        assert any("'1.0._extra_state'" in notice for notice in report.notices)


def test_mappings_of_ones_own_take_them_too(tmp_path):
    path = write({f"net.{k}": v for k, v in stored().items()}, tmp_path, "safetensors")
    module = build()
    streamload.load_into(module, path, mapping=lambda name: name.removeprefix("net."))
    assert module[1][0].amax == 7.5
    module = build()
    streamload.load_into(module, path, mapping={f"net.{k}": k for k in stored()})
    assert module[1][0].amax == 7.5
    module = build()
    streamload.load_into(module, path, prefix="net")
    assert module[1][0].amax == 7.5


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_missing_and_unexpected_are_those_of_torch(tmp_path, kind):
    tensors = stored()
    del tensors["0._extra_state"]
    path = write(tensors, tmp_path, kind)
    with pytest.raises(streamload.PlanError, match=r"missing \(1\): '0\._extra_state'"):
        streamload.load_into(build(), path)
    module = build()
    report = streamload.load_into(module, path, strict=False)
    assert list(report.missing) == ["0._extra_state"]
    assert (module[0].amax, module[1][0].amax) == (1.0, 7.5)
    with pytest.raises(streamload.PlanError, match=r"unexpected \(1\): '1\.0\._extra_state'"):
        streamload.load_into(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2))), path)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_failure_takes_everything_back(tmp_path, device):
    path = write(stored(), tmp_path, "safetensors")
    with torch.device(device):
        module = nn.Sequential(Amax(2, 3), nn.Sequential(Failing(3, 2)))
    before = dict(module.named_parameters())
    message = r"m\.safetensors: tensor '1\.0\._extra_state': .*Failing.*ValueError: not this one"
    with pytest.raises(streamload.CheckpointError, match=message) as caught:
        streamload.load_into(module, path)
    assert isinstance(caught.value.__cause__, ValueError)
    assert ("'1.0.weight'" in str(caught.value)) is (device == "cpu")  # overwritten already
    assert module[0].amax == 1.0
    assert module[1][0].amax == 1.0
    assert module[1][0].seen == [1]
    assert module[1][0].deep == [{"a": 1}]
    assert not hasattr(module[1][0], "more")
    assert all(t is before[name] for name, t in module.named_parameters())


STATES = [
    None,
    {"scale": torch.arange(3.0), "steps": 4, "names": ["a", "b"], "dtype": torch.float16},
    (1, 2.5, True, "text", b"\x00\xffbytes"),
    bytearray(b"\x01\x80"),
    torch.arange(4).view(2, 2).t(),
    {1, 2.5, "a", (3, None)},
    {"frozen": frozenset([1, (2, 3)]), "empty": [set(), frozenset(), {}, [], ()]},
    OrderedDict(b=1, a=torch.ones(2)),
    nn.BatchNorm1d(2).state_dict(),
    Counter("hello"),
    defaultdict(list, a=[1]),
    [1 + 2j, torch.Size([2, 3]), torch.device("cuda", 1), torch.bfloat16, -(2**70)],
    {"deep": [[[[{"a": [torch.zeros(0)]}]]]]},
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_plain_objects_of_torch_files(tmp_path, state):
    saving, wanted = nn.Sequential(Keeping()), nn.Sequential(Keeping())
    saving[0].state = state
    path = write(saving.state_dict(), tmp_path, "pt")
    wanted.load_state_dict(torch.load(path, weights_only=False))
    with streamload.empty_weights():
        module = nn.Sequential(Keeping())
    streamload.load_into(module, path)
    same(module[0].state, wanted[0].state)
    assert torch.equal(module[0].linear.weight, wanted[0].linear.weight)


def same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, dict):
        if isinstance(expected, OrderedDict):
            assert vars(found) == vars(expected)
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    else:
        assert found == expected


def test_files_in_memory_as_transformer_engine_writes_them(tmp_path):
    file = io.BytesIO()
    torch.save({"scale": torch.ones(2)}, file)
    saving = nn.Sequential(Keeping())
    saving[0].state = file
    path = write(saving.state_dict(), tmp_path, "pt")
    module = nn.Sequential(Keeping())
    streamload.load_into(module, path)
    assert isinstance(module[0].state, io.BytesIO)
    assert module[0].state.getvalue() == file.getvalue()
    assert module[0].state.tell() == file.tell()
    module[0].state.seek(0)
    assert torch.load(module[0].state)["scale"].tolist() == [1.0, 1.0]


def test_a_module_that_takes_no_file_in_memory_keeps_its_own_and_it_is_told(tmp_path):
    tensors = dict(stored())
    tensors["0._extra_state"] = io.BytesIO(b"anything")
    module = build()
    report = streamload.load_into(module, write(tensors, tmp_path, "pt"))
    assert module[0].amax == 1.0
    assert module[1][0].amax == 7.5
    assert any("'0._extra_state' is an io.BytesIO" in notice for notice in report.notices)


class Foreign:
    pass


def looped():
    state = []
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": [Foreign()]}, "test_extra_state.Foreign"),
        (deque([1]), "collections.deque"),
        ([torch.empty(2, device="meta")], "without values"),
        (looped(), "holds itself"),
        (defaultdict(Foreign), "Foreign"),
    ],
)
def test_what_cannot_be_made_is_refused_while_planning(tmp_path, state, why):
    saving = nn.Sequential(Keeping())
    saving[0].state = state
    path = write(saving.state_dict(), tmp_path, "pt")
    module = nn.Sequential(Keeping())
    plan = streamload.plan(module, path)
    assert not plan.ok
    assert any("'0._extra_state'" in line and why in line for line in plan.problems)
    with pytest.raises(streamload.PlanError, match=r"0\._extra_state"):
        streamload.load_into(module, path, strict=False)
    assert module[0].state is None


def test_shared_parts_do_not_multiply(tmp_path):
    state: list = [torch.ones(1)]
    for _ in range(60):
        state = [state, state]
    saving = nn.Sequential(Keeping())
    saving[0].state = state
    module = nn.Sequential(Keeping())
    streamload.load_into(module, write(saving.state_dict(), tmp_path, "pt"))
    assert module[0].state[0] is module[0].state[1]


@pytest.mark.parametrize("state", [None, {"a": torch.ones(2)}, io.BytesIO(b"x")])
def test_an_object_that_no_module_takes_is_unexpected(tmp_path, state):
    saving = nn.Sequential(Keeping())
    saving[0].state = state
    tensors = {k.replace("linear.", ""): v for k, v in saving.state_dict().items()}
    path = write(tensors, tmp_path, "pt")
    module = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="_extra_state"):
        module.load_state_dict(torch.load(path, weights_only=False))
    with pytest.raises(streamload.PlanError, match=r"unexpected \(1\): '0\._extra_state'"):
        streamload.load_into(module, path)
    report = streamload.load_into(module, path, strict=False)
    assert report.unexpected == ("0._extra_state",)
    assert torch.equal(module[0].weight, saving[0].linear.weight)
    streamload.load_into(module, path, mapping=lambda n: None if "_extra" in n else n)


def test_without_a_module_they_are_told(tmp_path):
    saving = nn.Sequential(Keeping())
    saving[0].state = {"a": torch.ones(2)}
    path = write(saving.state_dict(), tmp_path, "pt")
    with pytest.warns(UserWarning, match=r"0\._extra_state"):
        assert set(streamload.load_state_dict(path)) == {"0.linear.weight", "0.linear.bias"}
    with streamload.open_checkpoint(path) as source:
        assert any("'0._extra_state'" in notice for notice in source.catalog.notices)


def test_export_writes_tensors_and_says_what_it_left_out(tmp_path):
    module = nn.Sequential(Amax(2, 3), Keeping())
    module[0].amax = 2.5
    module[1].state = {"a": 1}
    report = streamload.export(module, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["0._extra_state"].tolist() == [2.5]
    assert any("left out" in n and "'1._extra_state'" in n for n in report.notices)
    cast = streamload.export(module, tmp_path / "cast.safetensors", dtype="bfloat16")
    assert "0._extra_state" in [entry.name for entry in cast.written]
    assert load_file(tmp_path / "cast.safetensors")["0._extra_state"].dtype == torch.float32
    again = nn.Sequential(Amax(2, 3), nn.Linear(2, 2))
    streamload.load_into(
        again, tmp_path / "out.safetensors", mapping=lambda n: n.replace(".linear", "")
    )
    assert again[0].amax == 2.5
