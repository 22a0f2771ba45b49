"""What files really hold beside or instead of the published names: lists, and nothing touched."""

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, PlanError
from streamload.mapping.combining import Concat, HeadSplit, Split
from tests.families.tiny import CONFIG, llama, of_transformers, reference, values, write

INV_FREQ = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
BIASES = sorted(name for name in llama(has_bias=True) if name.endswith(".bias"))


def renamed(tensors, **changes):
    found = {}
    for name, tensor in tensors.items():
        for old, new in changes.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def check_untouched(model):
    assert all(parameter.is_meta for parameter in model.parameters())


# --- rotary tables ---------------------------------------------------------------------------


def with_rotary_tables(dtypes=(torch.float32, torch.float32)):
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": INV_FREQ.to(dtype)
        for layer, dtype in enumerate(dtypes)
    }
    return llama() | extra, sorted(extra)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("make", [reference, of_transformers])
def test_stored_rotary_tables_are_ignored_by_name(tmp_path, make, dtypes):
    tensors, tables = with_rotary_tables(dtypes)
    write(tmp_path, tensors, **CONFIG)
    report = streamload.load_into(make(), tmp_path)
    assert sorted(report.ignored) == tables
    assert report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")


def test_a_model_that_keeps_a_rotary_table_gets_it_in_float32(tmp_path):
    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(4))

    model = reference()
    for block in model.blocks:
        block.rotary_emb = Rotary()
    stored = {f"blocks.{layer}.rotary_emb.inv_freq": INV_FREQ for layer in range(2)}
    mine = streamload.load_state_dict(write(tmp_path, llama(), **CONFIG))
    (tmp_path / "config.json").unlink()
    write(tmp_path, mine | stored)
    streamload.load_into(model, tmp_path, dtype="bfloat16")
    for block in model.blocks:
        assert block.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(block.rotary_emb.inv_freq, INV_FREQ)
        assert block.ln1.scale.dtype == torch.bfloat16


# --- heads of the vocabulary -----------------------------------------------------------------


@pytest.mark.parametrize("make", [reference, of_transformers])
def test_an_untied_model_without_a_head_is_refused(tmp_path, make):
    model = make()
    write(tmp_path, llama(has_head=False), **CONFIG)
    with pytest.raises(PlanError) as caught:
        streamload.load_into(model, tmp_path)
    assert caught.value.report.missing == ("lm_head.weight",)
    assert caught.value.report.unexpected == ()
    check_untouched(model)
    report = streamload.load_into(model, tmp_path, strict=False)
    assert report.missing == ("lm_head.weight",)
    assert model.lm_head.weight.is_meta


TIED = CONFIG | {"tie_word_embeddings": True}


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_model_is_filled_by_either_name(tmp_path, kept):
    tensors = llama(has_head=False)
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    loaded = streamload.load(write(tmp_path, tensors, **TIED))
    assert loaded.model.lm_head.weight is loaded.model.tok_embed.weight
    assert torch.equal(loaded.model.lm_head.weight, tensors[kept])
    assert loaded.report.missing == ()
    assert loaded.report.tied == (("tok_embed.weight", "lm_head.weight"),)


def test_a_tied_model_with_two_different_heads_is_refused(tmp_path):
    model = reference(tie_word_embeddings=True)
    write(tmp_path, llama(), **TIED)
    with pytest.raises(streamload.StreamloadError, match=r"lm_head\.weight"):
        streamload.load_into(model, tmp_path)
    check_untouched(model)
    report = streamload.load_into(model, tmp_path, ties="keep")
    assert torch.equal(model.lm_head.weight, values(1, 11, 16))
    assert report.notices


def test_both_heads_of_a_tied_model_may_be_there_if_they_agree(tmp_path):
    tensors = llama(has_head=False)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = streamload.load(write(tmp_path, tensors, **TIED)).model
    assert model.lm_head.weight is model.tok_embed.weight


# --- biases ----------------------------------------------------------------------------------


def test_qwen2_has_biases_on_q_k_and_v(tmp_path):
    tensors = llama(has_bias=True)
    loaded = streamload.load(write(tmp_path, tensors, **CONFIG | {"model_type": "qwen2"}))
    attention = loaded.model.blocks[1].attn
    for part in "qkv":
        expected = tensors[f"model.layers.1.self_attn.{part}_proj.bias"]
        assert torch.equal(getattr(attention, part).bias, expected)
    assert attention.out_proj.bias is None


@pytest.mark.parametrize("make", [reference, of_transformers])
def test_biases_that_a_llama_has_not_are_unexpected(tmp_path, make):
    model = make()
    write(tmp_path, llama(has_bias=True), **CONFIG)
    with pytest.raises(PlanError) as caught:
        streamload.load_into(model, tmp_path)
    assert sorted(caught.value.report.unexpected) == BIASES
    assert caught.value.report.missing == ()
    check_untouched(model)


# --- grouped heads ---------------------------------------------------------------------------

GROUPED = {"kv2-into-4": (2, 4), "kv4-into-2": (4, 2)}


@pytest.mark.parametrize(("stored", "wanted"), GROUPED.values(), ids=GROUPED)
@pytest.mark.parametrize("make", [reference, of_transformers])
def test_another_number_of_key_value_heads(tmp_path, make, stored, wanted):
    config = CONFIG | {"num_key_value_heads": wanted}
    model = make(num_key_value_heads=wanted)
    write(tmp_path, llama(kv_heads=stored), **config)
    with pytest.raises(PlanError) as caught:
        streamload.load_into(model, tmp_path)
    found = {m.source: (m.stored_shape, m.shape) for m in caught.value.report.shape_mismatch}
    shapes = (4 * stored, 16), (4 * wanted, 16)
    assert found == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": shapes
        for layer in range(2)
        for part in "kv"
    }
    check_untouched(model)


@pytest.mark.parametrize(
    ("tensors", "changes"),
    [
        (llama(kv_heads=1), {"num_key_value_heads": 1}),
        (llama(size=8), {"head_dim": 8}),
        (llama(kv_heads=4), {"num_key_value_heads": None}),
    ],
    ids=["one", "head-size-of-its-own", "as-many-by-default"],
)
def test_head_counts_and_sizes_that_are_legal(tmp_path, tensors, changes):
    loaded = streamload.load(write(tmp_path, tensors, **CONFIG | changes))
    for part in "qkv":
        expected = tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert torch.equal(getattr(loaded.model.blocks[0].attn, part).weight, expected)


# --- fused and separate ----------------------------------------------------------------------


def with_fused(tensors, names, fused):
    found = dict(tensors)
    for layer in range(2):
        start = f"model.layers.{layer}."
        parts = [found.pop(f"{start}{name}.weight") for name in names]
        found[f"{start}{fused}.weight"] = torch.cat(parts)
    return found


FUSED = {
    "gate-up": (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    "qkv": (tuple(f"self_attn.{part}_proj" for part in "qkv"), "self_attn.qkv_proj"),
}


@pytest.mark.parametrize(("names", "fused"), FUSED.values(), ids=FUSED)
def test_a_packing_the_table_does_not_know_gives_both_lists(tmp_path, names, fused):
    model = of_transformers()
    write(tmp_path, with_fused(llama(), names, fused))
    with pytest.raises(PlanError) as caught:
        streamload.load_into(model, tmp_path)
    blocks = [f"model.layers.{layer}." for layer in range(2)]
    assert sorted(caught.value.report.missing) == sorted(
        f"{block}{name}.weight" for block in blocks for name in names
    )
    assert sorted(caught.value.report.unexpected) == [f"{block}{fused}.weight" for block in blocks]
    check_untouched(model)


@pytest.mark.parametrize(("names", "fused"), FUSED.values(), ids=FUSED)
def test_a_rule_cuts_a_known_packing(tmp_path, names, fused):
    tensors = llama()
    write(tmp_path, with_fused(tensors, names, fused))
    block = "model.layers.{layer}."
    packed = streamload.Rule(
        f"{block}{fused}.weight", tuple(f"{block}{name}.weight" for name in names), Split(0)
    )
    others = {n.replace(".1.", ".0.").replace(".0.", ".{layer}.") for n in tensors}
    plain = [
        streamload.Rule(name, name)
        for name in sorted(others)
        if not any(f".{part}." in name for part in names)
    ]
    model = of_transformers()
    streamload.load_into(model, tmp_path, mapping=streamload.NameMap((packed, *plain), layers=2))
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())


def test_separate_matrices_into_a_fused_module(tmp_path):
    gate, up = values(5, 24, 16), values(6, 24, 16)
    write(tmp_path, {"gate.weight": gate, "up.weight": up})
    rule = streamload.Rule(("gate.weight", "up.weight"), "weight", Concat(0, (24, 24)))
    with streamload.empty_weights():
        model = torch.nn.Linear(16, 48, bias=False)
    streamload.load_into(model, tmp_path, mapping=streamload.NameMap((rule,)))
    assert torch.equal(model.weight, torch.cat((gate, up)))


def test_rows_of_gpt_neox_are_cut_by_head(tmp_path):
    q, k, v = (values(seed, 2, 4, 8) for seed in (31, 32, 33))
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    write(tmp_path, {name: torch.stack((q, k, v), 1).reshape(24, 8)})
    rule = streamload.Rule(name, ("q.weight", "k.weight", "v.weight"), HeadSplit(2))
    found = streamload.load_state_dict(tmp_path, mapping=streamload.NameMap((rule,)))
    for part, expected in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(found[f"{part}.weight"], expected.reshape(8, 8))


# --- wrappers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model.": ""},
        {"model.": "module.model."},
        {"model.": "_orig_mod.model.", "lm_head": "_orig_mod.lm_head"},
        {"layers.0.": "layers.0._orig_mod."},
    ],
    ids=["base-model", "module", "compiled", "compiled-block"],
)
def test_wrapped_names_are_the_same_checkpoint(tmp_path, change):
    plain = streamload.load_state_dict(write(tmp_path, llama(), **CONFIG))
    again = streamload.load(write(tmp_path, renamed(llama(), **change), **CONFIG))
    assert again.report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    assert all(torch.equal(t, plain[n]) for n, t in again.model.state_dict().items())


# --- what there is no model for --------------------------------------------------------------

EXPERTS = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    "qwen3": "model.layers.0.mlp.experts.3.gate_proj.weight",
    "vision": "vision_tower.blocks.0.attn.qkv.weight",
}


@pytest.mark.parametrize("name", EXPERTS.values(), ids=EXPERTS)
def test_experts_and_vision_are_refused_with_their_names(tmp_path, name):
    model = reference()
    write(tmp_path, llama() | {name: values(1, 24, 16)}, **CONFIG)
    with pytest.raises(PlanError, match="unexpected") as caught:
        streamload.load_into(model, tmp_path)
    assert caught.value.report.unexpected == (name,)
    assert repr(name) in str(caught.value)
    check_untouched(model)
    with pytest.raises(PlanError):
        streamload.load(tmp_path)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "llava", None])
def test_a_model_type_without_a_model_is_refused_by_name(tmp_path, model_type):
    write(tmp_path, llama(), **CONFIG | {"model_type": model_type})
    with pytest.raises(CheckpointError, match=f"model_type {model_type!r}.*mistral"):
        streamload.load(tmp_path)
