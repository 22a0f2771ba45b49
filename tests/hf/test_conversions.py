"""Every operation and renaming that the installed transformers defines: what becomes of it."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping, core_model_loading, modeling_utils
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    ErnieSplitAndDecoupleTextVisionExperts,
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    Inkling2LoopDequantizeExperts,
    Inkling2LoopMergeMessageQueries,
    Inkling2UnpadVocab,
    Interleave,
    LayerPairCollapse,
    LinearToConv3d,
    MergeModulelist,
    PermuteForRope,
    PrefixChange,
    Split,
    SplitModulelist,
    Transpose,
    VisionFuseAndPermuteForRope,
    VisionUnfuseAndPermuteForRope,
    WeightConverter,
    WeightRenaming,
)

import streamload
from streamload import CheckpointError, load_into, load_transformers
from streamload.hf.conversions import ConvertingSource
from streamload.hf.library import TESTED_WITH
from streamload.hf.tracing import NoPlaceError, Traced
from streamload.mapping.layout import Layout
from streamload.sources.in_memory import MemorySource
from tests.hf.carrying import carried_out
from tests.hf.their_dozen import differences, saved

_ROOT = Path(transformers.__file__).parent
_BASES = {"ConversionOps", "WeightTransform"}
# Where operations are defined that undo quantisation or read GGUF: such folders are refused.
_REFUSED = ("integrations/",)


def defined() -> Iterator[tuple[str, str]]:
    """Every class of operations or renamings: its name, and its file in the library."""
    trees = {
        path: ast.parse(text)
        for path in sorted(_ROOT.rglob("*.py"))
        if "ConversionOps" in (text := path.read_text(encoding="utf-8"))
        or "WeightTransform" in text
    }
    known = set(_BASES)
    for _ in range(3):  # of classes derived from derived ones
        for path, tree in trees.items():
            for node in ast.walk(tree):
                bases = [getattr(b, "id", "") for b in getattr(node, "bases", ())]
                if isinstance(node, ast.ClassDef) and known.intersection(bases):
                    if node.name not in known:
                        yield node.name, path.relative_to(_ROOT).as_posix()
                    known.add(node.name)


_HEADS = SimpleNamespace(
    num_attention_heads=2, vision_config=SimpleNamespace(num_attention_heads=2), experts=3
)
_HEADS.get_text_config = lambda: SimpleNamespace(experts=3, vocab_size=6, unpadded_vocab_size=4)
_SHAPES = {"a": (2, 3), "b": (4, 3), "wide": (3, 4), "vocab": (4, 3)}


class _Model:
    """What operations ask of a model."""

    config = _HEADS

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(_SHAPES[name])


# Operation → sources by pattern with the shapes of their tensors, and targets.
_Case = tuple[ConversionOps, Mapping[str, list[tuple[int, ...]]], list[str]]
PLACES: list[_Case] = [
    (Chunk(0), {"s": [(6, 2)]}, ["a", "b"]),
    (Chunk(0, num_shards_attribute="experts"), {"s": [(6, 2)]}, ["e.*.w"]),
    (Split(0), {"s": [(6, 3)]}, ["a", "b"]),
    (Concatenate(1), {"s": [(3, 2)], "t": [(3, 4)]}, ["a"]),
    (Interleave(0), {"s": [(6, 2)]}, ["a"]),
    (Interleave(1, inverse=True), {"s": [(3, 4)]}, ["a"]),
    (MergeModulelist(0), {"s": [(2, 3)] * 3}, ["a"]),
    (MergeModulelist(1), {"s": [(2, 3)] * 3, "t": [(2, 3)] * 3}, ["a"]),
    (SplitModulelist(0), {"s": [(3, 2, 1)]}, ["e.*.w"]),
    (Transpose(0, 1), {"s": [(3, 4)]}, ["a"]),
    (Transpose(0, 1, check_dims=True), {"s": [(4, 3)]}, ["wide"]),
    (Transpose(0, 1, check_dims=True), {"s": [(3, 4)]}, ["wide"]),
    (Conv3dToLinear(2, (2, 1, 2)), {"s": [(3, 2, 2, 1, 2)]}, ["a"]),
    (LinearToConv3d(2, (2, 1, 2)), {"s": [(3, 8)]}, ["a"]),
    (PermuteForRope(), {"s": [(8, 3)]}, ["a"]),
    (PermuteForRope(), {"s": [(8,)]}, ["a"]),
    (PermuteForRope(subconfig_key="vision_config", inverse=True), {"s": [(8, 3)]}, ["a"]),
    (PermuteForRope(permute_layer_names=["q"]), {"q": [(8, 3)], "v": [(8, 3)]}, ["a"]),
    (
        ErnieFuseAndSplitTextVisionExperts(),
        {"gate": [(2, 3)] * 4, "up": [(2, 3)] * 4},
        ["text", "vision"],
    ),
    (
        ErnieSplitAndDecoupleTextVisionExperts(),
        {"text": [(2, 4, 3)], "vision": [(2, 4, 3)]},
        ["gate.*", "up.*"],
    ),
    (Inkling2LoopMergeMessageQueries(), {"s": [(6, 3)], "t": [(6, 3)]}, ["a"]),
    (Inkling2LoopMergeMessageQueries(inverse=True), {"s": [(3, 4, 3)]}, ["a", "b"]),
    (Inkling2UnpadVocab(), {"s": [(6, 3)]}, ["vocab"]),
]
COMPUTED: list[_Case] = [
    (Inkling2UnpadVocab(inverse=True), {"s": [(4, 3)]}, ["a"]),
    (
        Inkling2LoopDequantizeExperts(),
        {"s": [(2, 2, 16)], "scale": [(2, 2, 2)], "amax": [(2,)], "denominator": [(2,)]},
        ["a"],
    ),
]
# Their own code says that they are done with; they are made of two that are above.
DEPRECATED = (VisionFuseAndPermuteForRope, VisionUnfuseAndPermuteForRope)
# What reverses the undoing of a quantisation: never in a table that loads.
PASSED_ON = {"_IdentityOp"}


def code_of(case: _Case) -> Callable[..., list[torch.Tensor]]:
    """The operation's own code, as a function of all its tensors."""
    operation, sources, targets = case

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        left = iter(values)
        given = {pattern: [next(left) for _ in shapes] for pattern, shapes in sources.items()}
        model = _Model()
        made = operation.convert(
            given,
            source_patterns=list(sources),
            target_patterns=list(targets),
            full_layer_name=targets[0],
            model=model,
            config=model.config,
            missing_keys=None,
        )
        return [v[0] if isinstance(v, list) else v for v in made.values()]

    return run


def shapes_of(case: _Case) -> list[tuple[int, ...]]:
    return [shape for shapes in case[1].values() for shape in shapes]


@pytest.mark.parametrize("case", PLACES, ids=lambda case: repr(case[0]))
def test_a_re_layout_is_a_place(case: _Case) -> None:
    values = [torch.rand(shape) for shape in shapes_of(case)]
    found = carried_out(code_of(case), *values)
    wanted = code_of(case)(*values)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: repr(case[0]))
def test_what_computes_is_run_as_the_library_runs_it(case: _Case) -> None:
    stand_ins = [Traced(Layout.whole(0, shape), torch.float32) for shape in shapes_of(case)]
    with pytest.raises(NoPlaceError):
        code_of(case)(*stand_ins)
    code_of(case)(*(torch.ones(shape) for shape in shapes_of(case)))


RENAMED: list[tuple[WeightRenaming, Callable[[str], str]]] = [
    (WeightRenaming(r"\.ffn\.", ".mlp."), lambda n: n.replace(".mlp.", ".ffn.")),
    (
        GroupWeightRename(
            [r"\.norm0\.", r"\.norm1\."], [".input_layernorm.", ".post_attention_layernorm."]
        ),
        lambda n: n.replace("input_layernorm", "norm0").replace(
            "post_attention_layernorm", "norm1"
        ),
    ),
    (
        Inkling2IndexOffsetWeightRename(r"^late\.(\d+)\.", r"model.layers.\1.", offset=1),
        lambda n: n.replace("model.layers.1.", "late.0."),
    ),
    (PrefixChange(prefix_to_remove="outer"), lambda n: f"outer.{n}"),
    (
        LayerPairCollapse(),
        lambda n: (
            n.replace("0.self_attn", "0.mixer")
            .replace("1.self_attn", "2.mixer")
            .replace("1.mlp", "3.mixer")
            .replace("0.mlp", "1.mixer")
        ),
    ),
]


def test_every_class_that_the_library_defines_is_known() -> None:
    cases = [type(case[0]).__name__ for case in (*PLACES, *COMPUTED)]
    names = {type(renaming).__name__ for renaming, _ in RENAMED} | {WeightConverter.__name__}
    known = {*cases, *names, *(kind.__name__ for kind in DEPRECATED), *PASSED_ON}
    found = {name for name, file in defined() if not file.startswith(_REFUSED)}
    assert found == known
    assert any(file.startswith(_REFUSED) for _, file in defined())


def test_private_parts_are_those_of_the_version_tested_with() -> None:
    # Another version may do: then say so here, in library.py and in the README.
    assert transformers.__version__.startswith(TESTED_WITH)
    assert core_model_loading.__name__ in Path(streamload.hf.library.__file__).read_text("utf-8")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "llama")


def rewritten(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """A copy of ``folder`` with other tensors."""
    other = shutil.copytree(folder, folder.parent / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(change(tensors), other / "model.safetensors", {"format": "pt"})
    return other


def with_table(monkeypatch: pytest.MonkeyPatch, *table: Any) -> None:
    """Have the library take ``table`` for every model's renames and conversions."""

    def own(*_: Any, **__: Any) -> list[Any]:
        return list(table)

    for module in (conversion_mapping, modeling_utils):
        monkeypatch.setattr(module, "get_model_conversion_mapping", own)


@pytest.mark.parametrize(("renaming", "stored"), RENAMED, ids=lambda value: type(value).__name__)
def test_a_renaming_is_the_library_s_own(
    monkeypatch: pytest.MonkeyPatch,
    llama: Path,
    renaming: WeightRenaming,
    stored: Callable[[str], str],
) -> None:
    other = rewritten(llama, lambda tensors: {stored(n): t for n, t in tensors.items()})
    with_table(monkeypatch, renaming)
    wanted = transformers.LlamaForCausalLM.from_pretrained(llama)
    loaded = load_transformers(other)
    assert not differences(wanted, loaded.model)
    assert {t.name for t in loaded.report.loaded} == set(wanted.state_dict())


class Halved(ConversionOps):
    """Computes: a fused tensor that was stored doubled."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> Any:
        (values,) = input_dict.values()
        return dict(zip(target_patterns, (values[0] / 2).chunk(2), strict=True))


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")]
        found[f"model.layers.{layer}.mlp.both.weight"] = torch.cat(
            [found.pop(n) * 2 for n in names]
        )
    return found


def halving() -> WeightConverter:
    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    return WeightConverter(["mlp.both.weight"], targets, [Halved()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_conversion_that_computes_is_counted_and_carried_out(
    monkeypatch: pytest.MonkeyPatch, llama: Path, dtype: str
) -> None:
    other = rewritten(llama, doubled)
    plain = load_transformers(llama, dtype=dtype).report
    with_table(monkeypatch, halving())
    wanted = transformers.LlamaForCausalLM.from_pretrained(other, dtype=dtype)
    loaded = load_transformers(other, dtype=dtype)
    assert not differences(wanted, loaded.model)
    (one,) = (t for t in loaded.report.loaded if t.name == "model.layers.1.mlp.up_proj.weight")
    assert one.sources == (f"model.layers.1.mlp.both.weight (halved → {one.name})",)
    both = 2 * 48 * 32 * (4 if dtype == "float32" else 2)
    more = loaded.report.memory.staging_bytes - plain.memory.staging_bytes
    assert more >= 2 * both
    with streamload.empty_weights():
        part = transformers.LlamaForCausalLM(wanted.config).model.layers[1].mlp
    load_into(part, other, prefix="model.layers.1.mlp", dtype=dtype)
    assert not differences(wanted.model.layers[1].mlp, part)


class Broken(Halved):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        (values,) = input_dict.values()
        if type(values[0]) is torch.Tensor:
            raise RuntimeError("no such kernel")
        return {"": values[0] * 2}


def test_a_conversion_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    other = rewritten(llama, doubled)
    converter = halving()
    converter.operations[:] = [Broken()]
    with_table(monkeypatch, converter)
    with pytest.raises(CheckpointError, match=r"mlp\.both\.weight.*broken failed: no such kernel"):
        load_transformers(other)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "mixtral")
    lost = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    other = rewritten(folder, lambda t: {n: v for n, v in t.items() if n != lost})
    with pytest.raises(streamload.PlanError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load_transformers(other)


def test_a_converting_source_passes_on_what_stands_beside_the_tensors():
    inner = MemorySource({"a": torch.zeros(2)})
    inner.objects, inner.versions = {"m._extra_state": object()}, {"m": {"version": 2}}
    source = ConvertingSource(inner, {})
    assert (source.objects, source.versions) == (inner.objects, inner.versions)
