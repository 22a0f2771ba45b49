"""``load_into``: whose names go where, and what a report says of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamload
from streamload import NameMap, Rule, Transpose
from streamload.mapping.tables.gpt2_names import gpt2_map
from tests.support.tiny import (
    LAYERS,
    WIDTH,
    bag,
    bag_of,
    gpt2_tensors,
    holds,
    meta_gpt2,
    refused,
    same_bits,
    values,
    with_masks,
    write,
    write_gpt2,
)

TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
TABLE = gpt2_map({"n_layer": LAYERS})


def prefixed(tensors, prefix):
    return {prefix + name: t for name, t in tensors.items()}


def published(tied=True):
    """A module with published names, as transformers has it: Conv1D, head tied."""
    return bag_of(
        prefixed(gpt2_tensors(), "transformer."),
        tied={"lm_head.weight": "transformer.wte.weight"} if tied else None,
    )


def assert_is_gpt2(model: nn.Module) -> None:
    """Local names, the four matrices of each layer turned, everything else as stored."""
    expected = gpt2_tensors()
    assert same_bits(model.tok_embed.weight, expected["wte.weight"])
    assert same_bits(model.pos_embed.weight, expected["wpe.weight"])
    assert model.lm_head.weight is model.tok_embed.weight
    for layer, block in enumerate(model.blocks):
        stored = {n.removeprefix(f"h.{layer}."): t for n, t in expected.items()}
        for published_name, parameter in (
            ("attn.c_attn", block.attn.qkv),
            ("attn.c_proj", block.attn.out_proj),
            ("mlp.c_fc", block.mlp.fc1),
            ("mlp.c_proj", block.mlp.fc2),
        ):
            weight = stored[f"{published_name}.weight"]
            assert same_bits(parameter.weight, weight.t().contiguous())
            assert parameter.weight.is_contiguous()
            assert same_bits(parameter.bias, stored[f"{published_name}.bias"])
        assert same_bits(block.ln1.scale, stored["ln_1.weight"])
        assert same_bits(block.ln2.shift, stored["ln_2.bias"])
    assert same_bits(model.final_ln.scale, expected["ln_f.weight"])


WRAPPERS = [
    "",
    "transformer.",
    "module.transformer.",
    "_orig_mod.transformer.",
    "_orig_mod.module.transformer.",
    "module._orig_mod.transformer.",
    "module.module.transformer.",
    "model.transformer.",
    "model.",
    "module.",
    "_orig_mod.",
    "module.model.transformer.",
    "_fsdp_wrapped_module.transformer.",
]


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrappers_are_all_the_same_checkpoint(tmp_path, prefix):
    folder = write_gpt2(tmp_path, prefixed(gpt2_tensors(), prefix))
    model = meta_gpt2()
    report = streamload.load_into(model, folder)
    assert (report.missing, report.unexpected, report.ignored) == ((), (), ())
    assert_is_gpt2(model)
    other = published()
    report = streamload.load_into(other, folder)
    assert (report.missing, report.unexpected) == ((), ())
    assert holds(other, prefixed(gpt2_tensors(), "transformer."))
    assert other.lm_head.weight is other.transformer.wte.weight


def test_some_names_wrapped_and_others_not(tmp_path):
    tensors = {
        ("module.transformer." if n.startswith("h.") else "transformer.") + n: t
        for n, t in gpt2_tensors().items()
    }
    model = meta_gpt2()
    streamload.load_into(model, write_gpt2(tmp_path, tensors))
    assert_is_gpt2(model)


def test_a_block_compiled_by_itself(tmp_path):
    tensors = {n.replace("h.0.", "h.0._orig_mod."): t for n, t in gpt2_tensors().items()}
    model = meta_gpt2()
    streamload.load_into(model, write_gpt2(tmp_path, tensors))
    assert_is_gpt2(model)


def test_a_module_that_is_wrapped_itself(tmp_path):
    tensors = {"lin.weight": values(1, 3, 2), "lin.bias": values(2, 3)}
    path = write(tmp_path / "x.safetensors", tensors)
    for wrapper in ("module.", "_orig_mod.", "module._orig_mod."):
        module = bag_of(prefixed(tensors, wrapper))
        assert streamload.load_into(module, path).ok
        assert holds(module, prefixed(tensors, wrapper))


@pytest.mark.parametrize("build", [meta_gpt2, published])
def test_two_names_on_one_target_are_refused_with_both(tmp_path, build):
    tensors = prefixed(gpt2_tensors(), "transformer.")
    tensors["module.transformer.ln_f.bias"] = values(99, WIDTH)
    folder = write_gpt2(tmp_path, tensors)
    model = build()
    with refused(folder, model) as caught:
        streamload.load_into(model, folder)
    assert "'module.transformer.ln_f.bias' and 'transformer.ln_f.bias'" in str(caught[0])


@pytest.mark.parametrize("child", ["module", "model", "transformer", "_orig_mod"])
def test_a_real_child_of_a_wrappers_name_is_kept(tmp_path, child):
    tensors = {f"{child}.weight": values(1, 2, 2), f"{child}.bias": values(2, 2), "w": values(3, 2)}
    path = write(tmp_path / "x.safetensors", tensors)
    module = bag_of(tensors)
    assert streamload.load_into(module, path).ok
    assert holds(module, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
@pytest.mark.parametrize("prefix", ["", "transformer.", "module.transformer."])
@pytest.mark.parametrize("build", [meta_gpt2, published])
def test_masks_are_ignored_by_name_and_biases_are_not(tmp_path, dtype, prefix, build):
    folder = write_gpt2(tmp_path, prefixed(with_masks(gpt2_tensors(), dtype), prefix))
    model = build()
    report = streamload.load_into(model, folder)
    assert sorted(report.ignored) == sorted(
        f"{prefix}h.{i}.attn.{n}" for i in range(LAYERS) for n in ("bias", "masked_bias")
    )
    loaded = {source for entry in report.loaded for source in entry.sources}
    assert {f"{prefix}h.0.attn.c_attn.bias", f"{prefix}h.1.attn.c_proj.bias"} <= loaded


@pytest.mark.parametrize("masks_in_file", [True, False])
def test_a_module_that_owns_the_masks(tmp_path, masks_in_file):
    tensors = gpt2_tensors()
    stored = with_masks(tensors, torch.bool) if masks_in_file else tensors
    module = bag_of(tensors)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    for layer in module.h.children():
        layer.attn.register_buffer("bias", mask.clone())
    report = streamload.load_into(module, write(tmp_path / "x.safetensors", stored))
    assert report.missing == ()
    own = module.h.get_submodule("1").attn.get_buffer("bias")
    assert torch.equal(own, mask.tril() if masks_in_file else mask)


def test_the_square_matrix_is_turned_too_and_never_loaded_the_wrong_way(tmp_path):
    linear = {n: t.t() if n.endswith(TURNED) else t for n, t in gpt2_tensors().items()}
    folder = write_gpt2(tmp_path, linear)
    model = meta_gpt2()
    with refused(folder, model) as caught:
        streamload.load_into(model, folder, mapping=TABLE)
    found = {m.source for m in caught[0].report.shape_mismatch}
    assert found == {
        f"h.{i}.{n}.weight"
        for i in range(LAYERS)
        for n in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")
    }


@pytest.mark.parametrize("name", ["wte.weight", "lm_head.weight"])
def test_either_end_of_the_tied_head(tmp_path, name):
    tensors = gpt2_tensors()
    tensors[name] = tensors.pop("wte.weight")
    folder = write_gpt2(tmp_path, tensors)
    model = meta_gpt2()
    assert streamload.load_into(model, folder).missing == ()
    assert_is_gpt2(model)


SIZES = [({"vocab": 16}, 13, 16), ({"vocab": 11}, 13, 11)]


@pytest.mark.parametrize(("build", "stored", "wanted"), SIZES)
@pytest.mark.parametrize("strict", [True, False])
def test_a_vocabulary_of_another_size(tmp_path, build, stored, wanted, strict):
    folder = write_gpt2(tmp_path)
    model = meta_gpt2(**build)
    embedding = model.tok_embed.weight
    if strict:
        with refused(folder, model) as caught:
            streamload.load_into(model, folder)
        report = caught[0].report
    else:
        report = streamload.load_into(model, folder, strict=False)
        assert model.tok_embed.weight is embedding
        assert model.lm_head.weight is embedding
        assert report.unfilled == ("tok_embed.weight",)
    (entry,) = report.shape_mismatch
    assert entry.to_dict() == {
        "source": "wte.weight",
        "stored_shape": [stored, WIDTH],
        "name": "tok_embed.weight",
        "shape": [wanted, WIDTH],
    }


@pytest.mark.parametrize(("in_file", "missing", "unexpected"), [(3, 0, 12), (1, 12, 0), (2, 0, 0)])
def test_another_number_of_layers_lists_every_name(tmp_path, in_file, missing, unexpected):
    path = write(tmp_path / "x.safetensors", gpt2_tensors(in_file))
    made = streamload.plan(meta_gpt2(), path, mapping=TABLE)
    assert len(made.report.missing) == missing
    assert len(made.report.unexpected) == unexpected
    assert all(n.startswith("blocks.1.") for n in made.report.missing)
    assert all(n.startswith("h.2.") for n in made.report.unexpected)


@pytest.mark.parametrize("expected", [1, 3])
def test_expected_layers(tmp_path, expected):
    folder = write_gpt2(tmp_path)
    model = meta_gpt2()
    with refused(folder, model) as caught:
        streamload.load_into(model, folder, expected_layers=expected)
    assert f"expected_layers={expected}" in str(caught[0])
    assert streamload.load_into(model, folder, expected_layers=LAYERS).ok


THREE = {"a": values(1, 2, 3), "b": values(2, 3), "c": values(3, 1)}


class TestMappings:
    @pytest.fixture
    def path(self, tmp_path):
        return write(tmp_path / "x.safetensors", THREE)

    def module(self):
        return bag({"lin.weight": (2, 3), "lin.bias": (3,)})

    def right(self, module):
        return holds(module, {"lin.weight": THREE["a"], "lin.bias": THREE["b"]})

    def test_a_dict(self, path):
        module = self.module()
        with refused(path, module) as caught:
            streamload.load_into(module, path, mapping={"a": "lin.weight", "b": "lin.bias"})
        assert caught[0].report.unexpected == ("c",)
        table = {"a": "lin.weight", "b": "lin.bias", "c": None}
        report = streamload.load_into(module, path, mapping=table)
        assert report.ignored == ("c",)
        assert self.right(module)

    def test_a_function(self, path):
        names = {"a": "lin.weight", "b": "lin.bias"}
        module = self.module()
        report = streamload.load_into(module, path, mapping=names.get)
        assert report.ignored == ("c",)
        assert self.right(module)

    def test_a_table(self, path):
        table = NameMap((Rule("a", "lin.weight", Transpose()), Rule("b", "lin.bias"), Rule("c")))
        module = bag({"lin.weight": (3, 2), "lin.bias": (3,)})
        report = streamload.load_into(module, path, mapping=table)
        assert [e.transform for e in report.loaded] == ["transpose", ""]
        assert same_bits(module.lin.weight, THREE["a"].t().contiguous())

    def test_what_the_function_raises_passes_through(self, path):
        with pytest.raises(ZeroDivisionError):
            streamload.load_into(self.module(), path, mapping=lambda name: 1 / 0)

    @pytest.mark.parametrize("mapping", ["published", 7, ["a"]])
    def test_other_things_are_refused(self, path, mapping):
        with pytest.raises((TypeError, ValueError), match="mapping"):
            streamload.load_into(self.module(), path, mapping=mapping)

    def test_two_names_on_one_target(self, path):
        module = self.module()
        table = {"a": "lin.weight", "b": "lin.bias", "c": "lin.bias"}
        with refused(path, module):
            streamload.load_into(module, path, mapping=table)

    def test_prefix(self, tmp_path):
        stored = prefixed(THREE, "student.") | prefixed(THREE, "teacher.")
        path = write(tmp_path / "y.safetensors", stored)
        module = bag_of(THREE)
        report = streamload.load_into(module, path, prefix="teacher")
        assert holds(module, THREE)
        assert all(entry.sources[0].startswith("teacher.") for entry in report.loaded)

    def test_own_names_in_a_folder_with_a_config(self, tmp_path):
        """A file converted to local names is taken as it is."""
        model = meta_gpt2()
        streamload.load_into(model, write_gpt2(tmp_path / "published"))
        local = {n: p.detach() for n, p in model.named_parameters()}
        again = meta_gpt2()
        report = streamload.load_into(again, write_gpt2(tmp_path / "local", local))
        assert all(entry.transform == "" for entry in report.loaded)
        assert_is_gpt2(again)


class TestOnAssign:
    def test_every_assignment_is_told_once_before_it_happens(self, tmp_path):
        folder = write_gpt2(tmp_path)
        model = meta_gpt2()
        calls = []

        def hook(stored, target):
            calls.append((stored, target))
            assert model.get_parameter(target).is_meta

        report = streamload.load_into(model, folder, on_assign=hook)
        assert sorted(calls) == sorted((e.sources[0], e.name) for e in report.loaded)

    def test_the_source_is_the_stored_name(self, tmp_path):
        path = write(tmp_path / "x.safetensors", {"p.w": values(1, 2)})
        calls = []
        streamload.load_into(
            bag({"w": (2,)}), path, prefix="p", on_assign=lambda *names: calls.append(names)
        )
        assert calls == [("p.w", "w")]


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_that_fits_is_always_a_failure(tmp_path, strict):
    path = write(tmp_path / "x.safetensors", {"encoder.x.weight": values(1, 3, 3)})
    module = bag({"lin.weight": (3, 3)})
    with refused(path, module) as caught:
        streamload.load_into(module, path, strict=strict)
    assert "nothing would be loaded" in str(caught[0])
    assert caught[0].report.unexpected == ("encoder.x.weight",)


def test_placeholders_of_a_sharded_run_are_one_mismatch_each(tmp_path):
    shapes = {"embed.weight": (11, 16), "up.weight": (24, 16), "norm.weight": (16,)}
    path = write(tmp_path / "x.safetensors", {n: torch.zeros(0) for n in shapes})
    module = bag(shapes)
    with refused(path, module) as caught:
        streamload.load_into(module, path)
    found = {m.source: (m.stored_shape, m.shape) for m in caught[0].report.shape_mismatch}
    assert found == {n: ((0,), shape) for n, shape in shapes.items()}


def test_an_eight_bit_weight_without_its_scale(tmp_path):
    weight = torch.tensor([[448.0, -448.0], [1.5, -0.25]]).to(torch.float8_e4m3fn)
    scale = {"lin.weight": weight, "lin.weight_scale_inv": torch.tensor([[2.0**-9]])}
    path = write(tmp_path / "x.safetensors", scale)
    module = bag({"lin.weight": (2, 2)})
    with refused(path, module) as caught:
        streamload.load_into(module, path, dtype="bfloat16")
    assert caught[0].report.unexpected == ("lin.weight_scale_inv",)
    report = streamload.load_into(module, path, dtype="bfloat16", strict=False)
    assert any("'lin.weight_scale_inv' is not applied" in n for n in report.notices)
    assert module.lin.weight.tolist() == [[448.0, -448.0], [1.5, -0.25]]


def test_rotary_tables(tmp_path):
    table = torch.tensor([1.0, 0.1, 0.01, 0.001])
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = write(tmp_path / "x.safetensors", {"model.norm.weight": torch.ones(4), name: table})
    module = bag({"model.norm.weight": (4,)})
    assert streamload.load_into(module, path, dtype="bfloat16").ignored == (name,)
    for where in (torch.ones(4), torch.ones(4, device="meta")):
        module = bag({"model.norm.weight": (4,), name.replace("inv_freq", "x"): (1,)})
        holder = module.get_submodule(name.rpartition(".")[0])
        del holder.x
        holder.register_buffer("inv_freq", where)
        streamload.load_into(module, path, dtype="bfloat16")
        assert same_bits(holder.inv_freq, table)
        assert module.get_parameter("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize(("strict", "in_file"), [(True, True), (True, False), (False, True)])
def test_the_modules_own_base_prefix_is_known(tmp_path, strict, in_file):
    """As transformers: a base model's file into a class with a head, and the other way round."""

    class Model(nn.Module):
        base_model_prefix = "bert"

        def __init__(self):
            super().__init__()
            inner = nn.ModuleDict({"encoder": nn.Linear(2, 3)})
            self.bert = inner if not in_file else None
            if in_file:
                self.encoder = inner["encoder"]

    stored = {"encoder.weight": torch.rand(3, 2), "encoder.bias": torch.rand(3)}
    names = {f"bert.{k}" if in_file else k: v for k, v in stored.items()}
    if not strict:
        names["cls.weight"] = torch.rand(1)
    save_file(names, tmp_path / "m.safetensors")
    with streamload.empty_weights():
        module = Model()
    report = streamload.load_into(module, tmp_path / "m.safetensors", strict=strict)
    assert report.unexpected == (() if strict else ("cls.weight",))
    for name, value in module.state_dict().items():
        assert torch.equal(value, stored[name.removeprefix("bert.")])
