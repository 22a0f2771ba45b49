"""``load_transformers`` leaves a model as ``from_pretrained`` does; that library is the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import streamload
from streamload import CheckpointError, PlanError, load_into, load_transformers
from tests.hf.their_dozen import DOZEN, differences, inputs_of, saved

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("dozen")
    return {name: saved(name, base / name) for name in DOZEN}


def reference(folder: Path, **options: Any) -> Any:
    """The model that the library's own loader makes of the class that the folder names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(hf, name).from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DOZEN)
def test_a_model_is_as_from_pretrained_leaves_it(
    folders: dict[str, Path], name: str, dtype: str | None
) -> None:
    wanted = reference(folders[name], dtype=dtype)
    loaded = load_transformers(folders[name], dtype=dtype)
    got: Any = loaded.model
    assert type(got) is type(wanted)
    assert not differences(wanted, got)
    assert got.config.to_dict() == wanted.config.to_dict() == loaded.config
    assert got.config._attn_implementation == wanted.config._attn_implementation
    assert not any(module.training for module in got.modules())
    if wanted.can_generate():
        assert got.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert set(vars(got)) == set(vars(wanted))


@pytest.mark.parametrize("name", DOZEN)
def test_a_model_gives_the_same_logits(folders: dict[str, Path], name: str) -> None:
    wanted = reference(folders[name])
    got: Any = load_transformers(folders[name], mode="map").model
    with torch.no_grad():
        assert torch.equal(got(**inputs_of(got)).logits, wanted(**inputs_of(wanted)).logits)


@pytest.mark.parametrize("name", DOZEN)
def test_load_into_a_module_of_the_library(folders: dict[str, Path], name: str) -> None:
    wanted = reference(folders[name])
    with streamload.empty_weights():
        got = type(wanted)(wanted.config)
    load_into(got, folders[name])
    assert not differences(wanted, got.eval(), grads=False)
    with streamload.empty_weights():
        got = type(wanted)(wanted.config)
    report = load_into(got, folders[name], dtype="bfloat16")
    half = reference(folders[name], dtype="bfloat16")
    named = {t.name for t in report.loaded}
    assert not named.intersection(differences(half, got.eval(), grads=False))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama"])
def test_load_into_every_part_of_a_model(folders: dict[str, Path], name: str) -> None:
    wanted = reference(folders[name])
    paths = [path for path, part in wanted.named_modules() if path and list(part.parameters())]
    for path in paths:
        with streamload.empty_weights():
            part = type(wanted)(wanted.config).get_submodule(path)
        stored = path.replace(".mlp", ".block_sparse_moe") if name == "mixtral" else path
        load_into(part, folders[name], prefix=stored)
        assert not differences(wanted.get_submodule(path), part, grads=False), path


def test_a_module_that_holds_data_is_overwritten_in_place(folders: dict[str, Path]) -> None:
    wanted = reference(folders["mixtral"])
    got = type(wanted)(wanted.config)
    before = {name: p.data_ptr() for name, p in got.named_parameters()}
    load_into(got, folders["mixtral"])
    assert {name: p.data_ptr() for name, p in got.named_parameters()} == before
    assert not differences(wanted, got.eval(), grads=False)


def test_experts_are_reported_as_what_they_come_from(folders: dict[str, Path]) -> None:
    report = load_transformers(folders["mixtral"]).report
    (fused,) = (t for t in report.loaded if t.name == "model.layers.1.mlp.experts.gate_up_proj")
    assert len(fused.sources) == 8
    assert fused.transform == "stack+concat"
    assert report.model_type == "mixtral"


@pytest.mark.parametrize("cls", [hf.AutoModelForCausalLM, hf.Qwen3ForCausalLM])
def test_a_class_is_taken(folders: dict[str, Path], cls: Any) -> None:
    got = load_transformers(folders["qwen3"], cls=cls).model
    assert type(got) is hf.Qwen3ForCausalLM
    assert got.lm_head.weight is got.model.embed_tokens.weight


def test_a_base_model_without_its_head(folders: dict[str, Path]) -> None:
    loaded = load_transformers(folders["llama"], cls=hf.AutoModel)
    assert loaded.report.ignored == ("lm_head.weight",)
    assert any("not of the base model" in n and "lm_head" in n for n in loaded.report.notices)
    assert not differences(hf.AutoModel.from_pretrained(folders["llama"]), loaded.model)


@pytest.mark.parametrize("name", ["model.layers.0.more.weight", "layers.0.more.weight"])
def test_what_a_base_model_should_have_a_place_for_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    tensors = load_file(folders["llama"] / "model.safetensors")
    shutil.copytree(folders["llama"], tmp_path / "more")
    save_file({**tensors, name: torch.ones(3)}, tmp_path / "more" / "model.safetensors")
    with pytest.raises(PlanError, match=r"unexpected \(1\).*more"):
        load_transformers(tmp_path / "more", cls=hf.AutoModel)


def test_a_class_with_a_head_does_not_pass_over_another_one(folders: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match=r"unexpected \(1\): 'lm_head"):
        load_transformers(folders["llama"], cls=hf.LlamaForTokenClassification)


def test_a_missing_head_is_initialised_as_the_library_does(folders: dict[str, Path]) -> None:
    cls = hf.AutoModelForSequenceClassification
    with pytest.raises(PlanError, match=r"missing .*score\.weight") as caught:
        load_transformers(folders["llama"], cls=cls)
    assert caught.value.report is not None
    assert caught.value.report.missing == ("score.weight",)
    torch.manual_seed(3)
    loaded = load_transformers(folders["llama"], cls=cls, strict=False)
    torch.manual_seed(3)
    assert not differences(cls.from_pretrained(folders["llama"]), loaded.model)
    assert loaded.report.missing == ("score.weight",)
    assert loaded.report.unexpected == ("lm_head.weight",)


def test_a_head_of_another_size_is_initialised_too(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["vit"], tmp_path / "vit")
    fields = json.loads((tmp_path / "vit" / "config.json").read_text())
    fields["id2label"] = {str(n): str(n) for n in range(7)}
    fields["label2id"] = {str(n): n for n in range(7)}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(PlanError, match="shape mismatch"):
        load_transformers(tmp_path / "vit")
    torch.manual_seed(4)
    loaded = load_transformers(tmp_path / "vit", strict=False)
    torch.manual_seed(4)
    wanted = reference(tmp_path / "vit", ignore_mismatched_sizes=True)
    assert not differences(wanted, loaded.model)
    assert {entry.name for entry in loaded.report.shape_mismatch} == {
        "classifier.weight",
        "classifier.bias",
    }


def test_names_of_ones_own_are_mapped_before_the_library_s(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["mixtral"], tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    tensors = load_file(file)
    odd = {name.replace("model.layers", "trunk.blocks"): t for name, t in tensors.items()}
    save_file(odd, file, {"format": "pt"})
    key_mapping = {r"^trunk\.blocks": "model.layers"}
    wanted = reference(tmp_path / "odd", key_mapping=key_mapping)
    got = load_transformers(tmp_path / "odd", key_mapping=key_mapping).model
    assert not differences(wanted, got)
    with pytest.raises(PlanError, match=r"trunk\.blocks"):
        load_transformers(tmp_path / "odd")


def test_a_checkpoint_in_the_local_hub_cache(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = tmp_path / "models--org--tiny"
    shutil.copytree(folders["bert"], repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    got = load_transformers("hf:org/tiny").model
    assert not differences(reference(folders["bert"]), got)


def test_a_model_saves_itself_back_under_published_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    load_transformers(folders["mixtral"]).model.save_pretrained(tmp_path)
    wanted = load_file(folders["mixtral"] / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_no_code_from_a_folder_is_run(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="trust_remote_code"):
        load_transformers(folders["llama"], trust_remote_code=True)  # type: ignore[call-arg]
    shutil.copytree(folders["llama"], tmp_path / "own")
    fields = json.loads((tmp_path / "own" / "config.json").read_text())
    fields["architectures"] = ["OwnForCausalLM"]
    fields["auto_map"] = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "own" / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(CheckpointError, match=r"OwnForCausalLM.*trust_remote_code"):
        load_transformers(tmp_path / "own")
    got = load_transformers(tmp_path / "own", cls=hf.AutoModelForCausalLM).model
    assert type(got) is hf.LlamaForCausalLM


@pytest.mark.parametrize("name", ["torch_dtype", "device_map", "revision", "attn_implementation"])
def test_what_from_pretrained_takes_is_answered(folders: dict[str, Path], name: str) -> None:
    with pytest.raises(TypeError, match=name):
        load_transformers(folders["llama"], **{name: "auto"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["NoSuchModel"]}, "'NoSuchModel', which transformers"),
        ({"hidden_size": "wide"}, "cannot build LlamaForCausalLM"),
        ({"num_hidden_layers": 3}, r"missing \(9\)"),
        ({"intermediate_size": 44}, "shape mismatch"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_what_does_not_fit_is_refused(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(folders["llama"], tmp_path / "bad")
    fields = json.loads((tmp_path / "bad" / "config.json").read_text())
    (tmp_path / "bad" / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(streamload.StreamloadError, match=message):
        load_transformers(tmp_path / "bad")


def test_a_checkpoint_without_a_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama"] / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_transformers(tmp_path)
