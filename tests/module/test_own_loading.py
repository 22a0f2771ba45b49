"""Modules that take part in their own loading: the same as torch's strict load_state_dict."""

import copy
import warnings
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import streamload

PRE = "ignore::FutureWarning"
pytestmark = pytest.mark.filterwarnings(PRE)


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


def saved(stored, path, kind):
    """The state dict in a file; safetensors keeps tensors alone."""
    if kind == "pt":
        torch.save(stored, path / "m.pt")
        return path / "m.pt"
    save_file(
        {k: v.detach().clone().contiguous() for k, v in stored.items()}, path / "m.safetensors"
    )
    return path / "m.safetensors"


def as_torch_does(build, stored, path, kind, *, device="cpu"):
    """Load with torch (strict) and with streamload, into an empty and a full module."""
    expected = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = copy.deepcopy(stored) if kind == "pt" else OrderedDict(stored)
        expected.load_state_dict(given)
    file = saved(stored, path, kind)
    modules = [build()]
    with streamload.empty_weights():
        modules.append(build())
    for module in modules:
        report = streamload.load_into(module, file)
        assert not report.missing
        assert not report.unexpected
        same(module, expected)
    return modules


def same(module, expected):
    found, wanted = module.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype


class Renaming(nn.Module):
    """Had its weight under another name once, and a buffer that is gone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        state_dict.pop(prefix + "steps", None)
        if prefix + "scale" not in state_dict:
            state_dict[prefix + "scale"] = torch.full((1,), 4.0)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Module):
    """Renames what is below it by a hook, of any of the three kinds."""

    def __init__(self, how):
        super().__init__()
        self.new = nn.Linear(2, 3)
        self.calls = 0
        if how == "public":
            self.register_load_state_dict_pre_hook(
                lambda module, state, prefix, *_: module.rename(state, prefix)
            )
        elif how == "private":
            self._register_load_state_dict_pre_hook(lambda state, prefix, *_: rename(state, prefix))
        else:
            self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state, prefix, *_):
        self.calls += 1
        rename(state, prefix)


def rename(state, prefix):
    for name in list(state):
        if name.startswith(prefix + "old."):
            state[prefix + "new." + name[len(prefix) + 4 :]] = state.pop(name)


def deep(build):
    return lambda: nn.Sequential(OrderedDict(a=nn.Linear(2, 2), inner=build()))


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_an_override_renames_drops_and_adds(tmp_path, kind):
    weight = torch.rand(3, 2)
    stored = {"inner.kernel": weight, "inner.steps": torch.ones(2), "a.weight": torch.rand(2, 2)}
    stored["a.bias"] = torch.rand(2)
    modules = as_torch_does(deep(Renaming), stored, tmp_path, kind)
    assert all(torch.equal(m.inner.weight, weight) for m in modules)


@pytest.mark.parametrize("how", ["public", "private", "method"])
def test_hooks_rename(tmp_path, how):
    build = deep(lambda: Hooked(how))
    stored = {
        name.replace("new.", "old."): value for name, value in filled(build()).state_dict().items()
    }
    as_torch_does(build, stored, tmp_path, "safetensors")
    as_torch_does(build, filled(build()).state_dict(), tmp_path, "pt")


def test_planning_leaves_the_module_alone(tmp_path):
    with streamload.empty_weights():
        module = Hooked("method")
    before = dict(vars(module))
    stored = {"old.weight": torch.rand(3, 2), "old.bias": torch.rand(3)}
    plan = streamload.plan(module, saved(stored, tmp_path, "safetensors"))
    assert plan.ok
    assert sorted(t.name for t in plan.tensors) == ["new.bias", "new.weight"]
    assert dict(vars(module)) == before
    assert module.calls == 0


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_old_batch_norm(tmp_path, kind, norm):
    def build():
        return nn.Sequential(nn.Linear(2, 4), norm(4))

    stored = filled(build()).state_dict()
    del stored["1.num_batches_tracked"]
    plain = OrderedDict(stored)
    as_torch_does(build, plain, tmp_path, kind)
    seen = filled(build())
    seen[1].num_batches_tracked += 7
    streamload.load_into(seen, saved(plain, tmp_path, kind))
    assert seen[1].num_batches_tracked == 7


def test_a_new_file_that_lacks_a_buffer_is_not_an_old_one(tmp_path):
    def build():
        return nn.Sequential(nn.BatchNorm1d(4))

    stored = build().state_dict()
    del stored["0.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        build().load_state_dict(stored)
    report = streamload.load_into(build(), saved(stored, tmp_path, "pt"))
    assert any("kept as built: 0.num_batches_tracked" in notice for notice in report.notices)


class Versioned(nn.Module):
    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 3:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_are_those_of_the_file(tmp_path):
    new = filled(deep(Versioned)()).state_dict()
    assert new._metadata["inner"]["version"] == 3
    as_torch_does(deep(Versioned), new, tmp_path, "pt")
    torch.save({"state_dict": new, "epoch": 3}, tmp_path / "nested.pt")
    module = deep(Versioned)()
    streamload.load_into(module, tmp_path / "nested.pt")
    assert torch.equal(module.inner.weight, new["inner.weight"])
    wrapped = OrderedDict((f"module.{k}", v) for k, v in new.items())
    wrapped._metadata = {f"module.{k}".rstrip("."): v for k, v in new._metadata.items()}
    for name, options in (
        ("wrapped", {}),
        ("under", {"prefix": "module"}),
        ("mapped", {"mapping": lambda name: name.removeprefix("module.")}),
    ):
        torch.save(wrapped, tmp_path / f"{name}.pt")
        module = deep(Versioned)()
        streamload.load_into(module, tmp_path / f"{name}.pt", **options)
        assert torch.equal(module.inner.weight, new["inner.weight"])
    old = {k.replace("inner.weight", "inner.w"): v for k, v in new.items()}
    as_torch_does(deep(Versioned), old, tmp_path, "safetensors")


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_weight_norm_old_and_new_names(tmp_path, kind):
    old = nn.Sequential(weight_norm(nn.Linear(2, 3)))
    stored = filled(old).state_dict()
    assert "0.weight_g" in stored

    def build():
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3)))

    as_torch_does(build, stored, tmp_path, kind)
    as_torch_does(build, filled(build()).state_dict(), tmp_path, kind)
    as_torch_does(lambda: nn.Sequential(weight_norm(nn.Linear(2, 3))), stored, tmp_path, kind)
    wrapped = {f"module.{name}": value for name, value in stored.items()}
    module = build()
    streamload.load_into(module, saved(wrapped, tmp_path, kind))
    assert torch.equal(module[0].parametrizations.weight.original0, stored["0.weight_g"])


def test_old_spectral_norm(tmp_path):
    def build():
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 3)))

    as_torch_does(build, filled(build()).state_dict(), tmp_path, "pt")
    as_torch_does(build, OrderedDict(filled(build()).state_dict()), tmp_path, "safetensors")


class Computing(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class InPlace(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"].mul_(2)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Looking(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        if state_dict[prefix + "weight"].max() > 1:
            state_dict[prefix + "bias"] = torch.zeros(3)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Taking(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.taken = state_dict.pop(prefix + "table")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Growing(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.weight = nn.Parameter(torch.zeros_like(state_dict[prefix + "weight"]))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hiding(nn.Linear):
    """Keeps what is stored in a place that no one sees."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.cache = {}

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.cache["table"] = state_dict.pop(prefix + "table")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Closing(nn.Linear):
    """Its hook reaches it by a closure."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []
        self.register_load_state_dict_pre_hook(lambda *_: self.seen.append(self))


class Writing(nn.Linear):
    """Its hook overwrites its weight, past the state dict."""

    def __init__(self, *sizes):
        super().__init__(*sizes)

        def write(*_):
            with torch.no_grad():
                self.weight.data.zero_()
                self.weight[0] = 1.0

        self.register_load_state_dict_pre_hook(write)


@pytest.mark.parametrize("kind", [Writing, Closing])
def test_a_hook_that_reaches_the_module_itself_changes_nothing(tmp_path, kind):
    path = saved({"0.weight": torch.rand(3, 2), "0.bias": torch.rand(3)}, tmp_path, "safetensors")
    module = nn.Sequential(kind(2, 3))
    before = copy.deepcopy(module.state_dict())
    assert not streamload.plan(module, path).ok
    with pytest.raises(streamload.PlanError, match=rf"'0' \({kind.__name__}\)"):
        streamload.load_into(module, path)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert getattr(module[0], "seen", []) == []


class Counting(nn.Linear):
    """Notes how it was loaded, in plain values."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.history = ["made"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.history.append(prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_plain_notes_are_taken_over(tmp_path):
    path = saved({"0.weight": torch.rand(3, 2), "0.bias": torch.rand(3)}, tmp_path, "safetensors")
    module = nn.Sequential(Counting(2, 3))
    assert streamload.plan(module, path).ok
    assert module[0].history == ["made"]
    streamload.load_into(module, path)
    assert module[0].history == ["made", "0."]


def test_hooks_after_the_load_change_nothing_while_planning(tmp_path):
    module = nn.Linear(2, 3)
    calls = []

    def allow(_module, keys):
        calls.append(1)
        module.allowed = True
        with torch.no_grad():
            module.bias.zero_()
        keys.missing_keys.clear()

    module.register_load_state_dict_post_hook(allow)
    bias = module.bias.detach().clone()
    path = saved({"weight": torch.rand(3, 2)}, tmp_path, "safetensors")
    assert not streamload.plan(module, path).ok  # a hook that writes cannot be asked beforehand
    assert torch.equal(module.bias, bias)
    assert not hasattr(module, "allowed")


@pytest.mark.parametrize("kind", [Computing, InPlace, Looking, Taking, Growing, Hiding])
def test_what_cannot_be_streamed_is_refused_by_name(tmp_path, kind):
    stored = {"0.weight": torch.rand(3, 2), "0.bias": torch.rand(3)}
    if kind in (Taking, Hiding):
        stored["0.table"] = torch.rand(2)
    path = saved(stored, tmp_path, "safetensors")
    for context in (streamload.empty_weights, nullcontext):
        with context():
            module = nn.Sequential(kind(2, 3))
        before = {name: (t, t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
        with pytest.raises(streamload.PlanError, match=rf"'0' \({kind.__name__}\)"):
            streamload.load_into(module, path)
        for name, tensor in module.state_dict(keep_vars=True).items():
            assert tensor is before[name][0]
            assert tensor.is_meta or torch.equal(tensor, before[name][1])
        assert not hasattr(module[0], "taken")
        assert not getattr(module[0], "cache", {})
    tensors = streamload.load_state_dict(path)
    module = nn.Sequential(kind(2, 3))
    module.load_state_dict(tensors)  # the way out that the message names


class Flagging(nn.Linear):
    was_loaded = False

    def _load_from_state_dict(self, *args):
        self.was_loaded = True
        super()._load_from_state_dict(*args)


def test_a_flag_is_set_with_the_commit(tmp_path):
    path = saved({"weight": torch.rand(3, 2), "bias": torch.rand(3)}, tmp_path, "safetensors")
    module = Flagging(2, 3)
    assert streamload.plan(module, path).ok
    assert "was_loaded" not in vars(module)
    streamload.load_into(module, path)
    assert module.was_loaded

    def fail(*_):
        raise KeyboardInterrupt

    with streamload.empty_weights():
        module = Flagging(2, 3)
    module.register_load_state_dict_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        streamload.load_into(module, path)
    assert "was_loaded" not in vars(module)
    assert module.weight.is_meta


def test_hooks_after_the_load_run_once_and_see_the_values(tmp_path):
    seen = []
    path = saved({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}, tmp_path, "safetensors")
    with streamload.empty_weights():
        module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2)))
    for name, part in (("top", module), ("a", module.a)):
        part.register_load_state_dict_post_hook(
            lambda m, keys, name=name: seen.append(
                (name, m, next(m.parameters()).detach().sum().item())
            )
        )
    streamload.load_into(module, path)
    assert seen == [("a", module.a, 4.0), ("top", module, 4.0)]


def test_a_hook_after_the_load_may_allow_missing_and_unexpected(tmp_path):
    def build():
        module = nn.Linear(2, 3)
        module.register_buffer("extra", torch.full((2,), 3.0))

        def allow(_module, keys):
            keys.missing_keys.clear()
            keys.unexpected_keys.clear()

        module.register_load_state_dict_post_hook(allow)
        return module

    stored = {"weight": torch.rand(3, 2), "bias": torch.rand(3), "old": torch.ones(1)}
    as_torch_does(build, stored, tmp_path, "safetensors")


def test_a_load_state_dict_of_its_own_is_refused_by_name(tmp_path):
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def load_state_dict(self, state_dict, *args, **kwargs):
            doubled = {name: tensor * 2 for name, tensor in state_dict.items()}
            return super().load_state_dict(doubled, *args, **kwargs)

    module = Doubles()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    with pytest.raises(streamload.PlanError, match=r"Doubles.*load_state_dict\(\) of its own"):
        streamload.load_into(module, tmp_path / "x.safetensors")
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    outer = nn.Sequential(module)  # torch calls the outermost module's only
    state = {f"0.{name}": tensor for name, tensor in before.items()}
    save_file(state, tmp_path / "y.safetensors")
    streamload.load_into(outer, tmp_path / "y.safetensors")
