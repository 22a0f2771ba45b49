import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from streamload.module.empty_weights import empty_weights


class Own(nn.Module):
    """A module as readers write them: tie, buffers, and initialisation of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.stats = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.full((6,), 3.0), requires_grad=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("table", torch.empty(3))
        nn.init.constant_(self.table, 2.0)
        self.apply(self._init_weights)
        self.embed.weight.data[0].zero_()
        with torch.no_grad():
            self.gain.mul_(2).add_(1)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
            nn.init.trunc_normal_(module.weight)


def build_empty(make=Own):
    with empty_weights():
        return make()


def test_parameters_are_on_meta_and_keep_names_shapes_and_flags():
    empty, real = build_empty(), Own()
    assert all(p.is_meta for p in empty.parameters())
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in empty.named_parameters()} == {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()
    }
    assert empty.training


def test_ties_made_in_init_survive():
    empty = build_empty()
    assert empty.head.weight is empty.embed.weight


def test_one_parameter_given_to_two_modules_stays_one():
    shared = nn.Parameter(torch.ones(3))
    with empty_weights():
        first, second = nn.Module(), nn.Module()
        first.weight = shared
        second.weight = shared
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert not shared.is_meta


def test_buffers_are_real_and_have_their_values():
    empty, real = build_empty(), Own()
    for name, buffer in empty.named_buffers():
        assert not buffer.is_meta
        assert torch.equal(buffer, dict(real.named_buffers())[name]), name
    assert empty.table.tolist() == [2.0, 2.0, 2.0]


def test_nothing_is_drawn_from_the_random_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build_empty()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name",
    sorted(n for n in vars(nn.init) if n.endswith("_") and not n.startswith("_") and n != "dirac_"),
)
def test_every_init_function_takes_a_meta_parameter(name):
    extra = {"constant_": (1.0,), "sparse_": (0.5,)}.get(name, ())
    with empty_weights():
        weight = nn.Linear(4, 4).weight
        assert getattr(nn.init, name)(weight, *extra) is weight
    assert weight.is_meta


def test_a_huge_layer_costs_no_memory():
    layer = build_empty(lambda: nn.Linear(40_000, 40_000))
    assert layer.weight.shape == (40_000, 40_000)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Conv2d(3, 4, 5),
        lambda: nn.TransformerEncoderLayer(8, 2),
    ],
)
def test_torchs_own_modules_can_be_built(make):
    assert all(p.is_meta for p in build_empty(make).parameters())


class Marked(nn.Parameter):
    """A Parameter subclass whose constructor asks for more than torch's does."""

    def __new__(cls, data, label):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.label = label
        return made


def test_a_parameter_subclass_keeps_its_class_and_attributes():
    with empty_weights():
        module = nn.Module()
        module.weight = Marked(torch.ones(3), "rows")
    assert type(module.weight) is Marked
    assert module.weight.is_meta
    assert module.weight.label == "rows"
    assert module.weight.requires_grad is False


def test_parameters_already_on_meta_are_left_alone():
    weight = nn.Parameter(torch.empty(3, device="meta"))
    with empty_weights():
        module = nn.Module()
        module.weight = weight
    assert module.weight is weight


def test_nesting_ends_with_the_outer_context():
    with empty_weights():
        with empty_weights():
            inner = nn.Linear(2, 2)
        between = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert inner.weight.is_meta
    assert between.weight.is_meta
    assert not after.weight.is_meta


def test_an_exception_puts_everything_back():
    hooks = dict(torch_module._global_parameter_registration_hooks)
    with pytest.raises(RuntimeError, match="in the middle"), empty_weights():
        raise RuntimeError("in the middle")
    layer = nn.Linear(50, 50)
    assert not layer.weight.is_meta
    assert 0 < layer.weight.abs().max() < 1
    assert dict(torch_module._global_parameter_registration_hooks) == hooks


def test_other_threads_build_as_ever():
    built = {}

    def build(key):
        built[key] = nn.Linear(30, 30)

    with empty_weights():
        thread = threading.Thread(target=build, args=("during",))
        thread.start()
        thread.join()
        mine = nn.Linear(30, 30)
    assert mine.weight.is_meta
    other = built["during"].weight
    assert other.device.type == "cpu"
    assert 0 < other.abs().max() <= 30**-0.5
    assert other.unique().numel() > 100


def test_contexts_of_two_threads_do_not_end_each_other():
    first_left, results = threading.Event(), {}

    def stay():
        with empty_weights():
            entered.set()
            first_left.wait(10)
            results["inside"] = nn.Linear(3, 3)
        results["after"] = nn.Linear(3, 3)

    entered = threading.Event()
    thread = threading.Thread(target=stay)
    with empty_weights():
        thread.start()
        entered.wait(10)
    mine = nn.Linear(3, 3)
    first_left.set()
    thread.join()
    assert not mine.weight.is_meta
    assert results["inside"].weight.is_meta
    assert not results["after"].weight.is_meta


def test_modules_built_meanwhile_in_many_threads_never_fail():
    errors, stop = [], threading.Event()

    def keep_building():
        try:
            while not stop.is_set():
                assert not nn.Linear(2, 2).weight.is_meta
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=keep_building) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with empty_weights():
            assert nn.Linear(2, 2).weight.is_meta
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_lazy_parameters_wait_for_their_shape():
    with empty_weights():
        layer = nn.LazyLinear(3)
    assert layer(torch.ones(2, 5)).shape == (2, 3)


def test_building_on_meta_imports_nothing():
    import subprocess
    import sys

    code = (
        "import sys, torch; from torch import nn\n"
        "from streamload.module.empty_weights import empty_weights\n"
        "before = len(sys.modules)\n"
        "with empty_weights():\n"
        "    module = nn.Embedding(1000, 100); module.weight.data.normal_(0, 0.02)\n"
        "print(len(sys.modules) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20
