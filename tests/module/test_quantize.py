"""quantize="int8": the right weights, the right values, the memory of an int8 model, no noise."""

import builtins
import copy
import io
import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload.cli import main
from streamload.module.int8_tensor import int8_tensor

torchao = pytest.importorskip("torchao", reason="the extra int8 is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=4, n_embd=64, n_positions=64, vocab_size=300)
    path = tmp_path_factory.mktemp("gpt2")
    # Not save_pretrained, whose progress bar leaves a thread behind.
    weights = GPT2LMHeadModel(config).state_dict()
    save_file(
        {n: t for n, t in weights.items() if n != "lm_head.weight"}, path / "model.safetensors"
    )
    config.to_json_file(path / "config.json")
    return path


def is_int8(parameter):
    return type(parameter.data).__name__ == "Int8Tensor"


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_linear_weights_only_and_as_torchao_makes_them(folder, dtype):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    found = streamload.load(folder, dtype=dtype, quantize="int8")
    peer = streamload.load(folder, dtype=dtype, mode="stream").model
    quantize_(peer.blocks, Int8WeightOnlyConfig(set_inductor_config=False))
    expected = dict(peer.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        is_linear = name.startswith("blocks") and name.endswith("weight")
        assert is_int8(parameter) == is_linear == is_int8(expected[name]), name
        assert parameter.dtype == expected[name].dtype
        if is_linear:
            assert not parameter.requires_grad
            assert torch.equal(parameter.qdata, expected[name].qdata), name
            assert torch.equal(parameter.scale, expected[name].scale), name
            assert parameter.scale.shape == (parameter.shape[0], 1)
            parameter, expected[name] = parameter.dequantize(), expected[name].dequantize()
        assert torch.equal(parameter, expected[name]), name
    assert found.model.lm_head.weight is found.model.tok_embed.weight
    ids = torch.arange(10).view(1, -1)
    with torch.inference_mode():
        assert torch.equal(found.model(ids), peer(ids))


def test_the_report_says_so(folder):
    report = streamload.load(folder, dtype="bfloat16", quantize="int8").report
    (notice,) = report.notices
    assert notice.startswith("12 linear layers quantised to int8")
    assert notice.endswith("all else is bfloat16")
    assert report.dtype == "bfloat16"
    dtypes = {entry.name: entry.dtype for entry in report.loaded}
    assert dtypes["blocks.0.attn.qkv.weight"] == "int8"
    assert dtypes["blocks.0.attn.qkv.bias"] == dtypes["tok_embed.weight"] == "bfloat16"


def test_it_generates(folder):
    model = streamload.load(folder, quantize="int8").model
    full = streamload.load(folder).model
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    found, expected = (list(streamload.generate(m, ids, max_new_tokens=5)) for m in (model, full))
    assert len(found) == len(expected) == 5
    with torch.inference_mode():
        error = (model(ids) - full(ids)).norm() / full(ids).norm()
    assert error < 0.02


def test_the_callers_on_layer_goes_first(folder):
    seen = []

    def on_layer(layer, tensors):
        seen.append((layer, len(tensors)))
        assert not any(is_int8(t) for t in tensors.values())
        if layer == 1:
            name = "blocks.1.mlp.fc1.weight"
            return {name: tensors[name] * 2, "blocks.1.attn": nn.Identity()}
        return None

    model = streamload.load(folder, quantize="int8", on_layer=on_layer).model
    full = streamload.load(folder).model
    assert [layer for layer, _ in seen] == [0, 1, 2, None]
    assert torch.equal(model.blocks[1].mlp.fc1.weight, full.blocks[1].mlp.fc1.weight * 2)
    assert isinstance(model.blocks[1].attn, nn.Identity)
    assert is_int8(model.blocks[1].mlp.fc2.weight)


def test_into_a_module_of_ones_own(folder):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(300, 64)
            self.extra = nn.Linear(64, 300, bias=False)

    with streamload.empty_weights():
        model = Own()
    model.wte.weight = nn.Parameter(torch.zeros(300, 64))

    def name_of(stored):
        return "extra.weight" if stored.endswith("wte.weight") else None

    with pytest.raises(streamload.PlanError, match=r"'wte.weight'"):
        streamload.load_into(model, folder, mapping=name_of, quantize="int8")
    report = streamload.load_into(model, folder, mapping=name_of, quantize="int8", strict=False)
    assert is_int8(model.extra.weight)
    assert "1 linear layer quantised" in report.notices[-1]


class TestRefused:
    def test_a_module_that_holds_data(self, folder):
        model = streamload.load(folder).model
        with pytest.raises(streamload.PlanError, match=r"quantize='int8' cannot be honoured"):
            streamload.load_into(model, folder, quantize="int8")

    def test_a_module_without_linear_layers(self, folder):
        with streamload.empty_weights():
            model = nn.ModuleDict({"wte": nn.Embedding(300, 64)})
        with pytest.raises(streamload.PlanError, match="no linear layer"):
            streamload.load_into(
                model,
                folder,
                mapping=lambda n: "wte.weight" if n.endswith("wte.weight") else None,
                quantize="int8",
            )

    def test_without_a_module(self, folder):
        with pytest.raises(streamload.PlanError, match="quantize needs a module"):
            streamload.load_state_dict(folder, quantize="int8")

    def test_other_kinds(self, folder):
        with pytest.raises(ValueError, match="quantize must be 'int8' or None"):
            streamload.load(folder, quantize="int4")

    def test_without_torchao(self, folder, monkeypatch):
        real = builtins.__import__

        def fake(name, *args, **kwargs):
            if name.startswith("torchao"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        int8_tensor.cache_clear()
        monkeypatch.setattr(builtins, "__import__", fake)
        with pytest.raises(streamload.MissingExtraError, match=r"streamload\[int8\]"):
            streamload.load(folder, quantize="int8")


class TestMemory:
    LAYERS, WIDTH = 32, 1024

    @pytest.fixture
    def path(self, tmp_path):
        weights = {f"{n}.weight": torch.ones(self.WIDTH, self.WIDTH) for n in range(self.LAYERS)}
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    @pytest.fixture
    def model(self):
        with streamload.empty_weights():
            return nn.Sequential(*(self._linear() for _ in range(self.LAYERS)))

    def _linear(self):
        return nn.Linear(self.WIDTH, self.WIDTH, bias=False)

    def test_it_never_is_the_model_in_bfloat16(self, path, model):
        options = {"dtype": "bfloat16", "quantize": "int8", "workers": 2, "chunk_bytes": 1 << 20}
        options["mapping"] = {f"{n}.weight": f"{n}.weight" for n in range(self.LAYERS)}
        int8 = self.LAYERS * self.WIDTH**2
        needed = streamload.plan(model, path, **options).memory.needed_bytes
        report = streamload.load_into(model, path, **options)
        assert report.memory.needed_bytes == needed
        assert int8 < needed < int8 + (16 << 20)
        assert report.memory.peak_anonymous_bytes < int8 + (24 << 20) < 2 * int8


class TestCommandLine:
    def test_other_kinds_are_wrong_usage(self, folder):
        assert CliRunner().invoke(main, ["load", str(folder), "--quantize", "int4"]).exit_code == 2

    def test_load_and_plan(self, folder):
        for command in ("load", "plan"):
            result = CliRunner().invoke(
                main, [command, str(folder), "--quantize", "int8", "--json"]
            )
            assert result.exit_code == 0, result.output
            assert "12 linear layers quantised" in json.loads(result.stdout)["notices"][-1]

    def test_generate_says_nothing_of_torchao(self, folder):
        command = [sys.executable, "-m", "streamload", "generate", str(folder), "--tokens", "1,2,3"]
        command += ["--max-new-tokens", "3", "--quantize", "int8", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert len(json.loads(done.stdout)["tokens"]) == 3


def plain(module):
    """The module with torchao's own class of weight."""
    for linear in module.modules():
        if isinstance(linear, nn.Linear) and is_int8(linear.weight):
            w = linear.weight
            copied = torchao.quantization.Int8Tensor(
                w.qdata, w.scale, w.block_size, w.dtype, zero_point=w.zero_point
            )
            linear.weight = nn.Parameter(copied, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 3), (8,), (3, 5), (0, 4), ()])
def test_products_are_torchaos_whatever_kernel_makes_them(folder, dtype, rows):
    block = streamload.load(folder, dtype=dtype, quantize="int8").model.blocks[0]
    peer = plain(copy.deepcopy(block))
    x = torch.randn(*rows, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for name in ("attn.qkv", "mlp.fc1"):  # with a bias, and called with and without it
        ours, theirs = block.get_submodule(name), peer.get_submodule(name)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(ours(x), theirs(x), rtol=2 * step, atol=4 * step)
        found = nn.functional.linear(x, ours.weight)
        torch.testing.assert_close(
            found, nn.functional.linear(x, theirs.weight), rtol=2 * step, atol=4 * step
        )


def test_gradients_reach_the_input(folder):
    block = streamload.load(folder, dtype=torch.bfloat16, quantize="int8").model.blocks[0]
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    block.mlp.fc1(x).sum().backward()
    expected = block.mlp.fc1.weight.dequantize().float().sum(0)
    torch.testing.assert_close(x.grad[0].float(), expected, rtol=0.05, atol=0.05)


def test_it_is_saved_as_torchaos(folder):
    model = streamload.load(folder, dtype="bfloat16", quantize="int8").model
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert b"streamload" not in buffer.getvalue()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    for name, tensor in model.state_dict().items():
        assert type(saved[name]) is not type(tensor) or not is_int8(tensor)
        if is_int8(tensor):
            assert torch.equal(saved[name].qdata, tensor.qdata)
            assert torch.equal(saved[name].scale, tensor.scale)
