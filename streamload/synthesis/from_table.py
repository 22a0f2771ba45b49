"""A preset's tensors: the name table of its architecture, walked backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from streamload.core.specs import Shape
from streamload.mapping.rules import NameMap
from streamload.mapping.tables.registry import ARCHITECTURES, mapping_for
from streamload.synthesis.recipes import Kind, Preset, Recipe

_STD = 0.02
# A randomly drawn tied model mostly repeats its input, because blocks of the usual small weights
# add little to the embedding. Small made-up models get blocks that speak up instead.
_LIVELY_BELOW_WIDTH = 512
_HEAD = "lm_head.weight"
_BLOCK = "blocks.{layer}."
_WRITES_TO_RESIDUAL = ("attn.out_proj", "mlp.fc2", "mlp.down")


def recipes_of(preset: Preset, config: Mapping[str, Any], masks: bool) -> Iterator[Recipe]:
    """The tensors of a checkpoint of ``config``, in file order."""
    table = mapping_for(config["model_type"], config)
    order = ("tok_embed", "pos_embed", *preset.block_order, "final_ln", "lm_head")
    parts = list(_parts(table, config, preset.repeats_head))
    modules = list(dict.fromkeys(part.module for part in parts))
    parts.sort(key=lambda p: (order.index(p.place), modules.index(p.module), p.at))
    if masks and preset.buffers is not None:
        first = next(i for i, part in enumerate(parts) if part.place == "attn")
        parts[first:first] = [_Part("attn", 0, r) for r in preset.buffers(config)]
    for in_block, group in groupby(parts, key=lambda p: p.place in preset.block_order):
        recipes = [part.recipe for part in group]
        for layer in range(table.layers or 0) if in_block else (0,):
            for recipe in recipes:
                yield replace(recipe, name=recipe.name.replace("{layer}", str(layer)))


@dataclass(frozen=True, slots=True)
class _Part:
    """A recipe with a template for a name, its local module, and which source of it it is."""

    module: str
    at: int
    recipe: Recipe

    @property
    def place(self) -> str:
        return self.module.partition(".")[0]


def _parts(table: NameMap, config: Mapping[str, Any], repeats_head: bool) -> Iterator[_Part]:
    shapes = ARCHITECTURES[config["model_type"]].shapes(config)
    width = shapes["tok_embed"][1]
    std, residual_std = _stds(width, table.layers or 0)
    seen: dict[str, str] = {}
    for rule in table.rules:
        if rule.ignores or (rule.targets[0] in seen and rule.optional):
            continue
        (local,) = rule.targets
        seen[local] = rule.sources[0]
        if local == _HEAD and table.ties and not repeats_head:
            continue
        module, _, end = local.removeprefix(_BLOCK).rpartition(".")
        shape: Shape = shapes.get(module, (width,))
        value = _STD
        if end == "weight" and _BLOCK in local:
            value = residual_std if module in _WRITES_TO_RESIDUAL else std
        if end in ("bias", "shift"):
            shape = shape[:1]
        kind: Kind = "norm" if end == "scale" else "normal"
        drawn_as = seen["tok_embed.weight"] if local == _HEAD and table.ties else None
        stored = rule.transform.source_shapes([shape])
        for at, (name, part) in enumerate(zip(rule.sources, stored, strict=True)):
            yield _Part(module, at, Recipe(name, part, kind, value, drawn_as=drawn_as))


def _stds(width: int, layers: int) -> tuple[float, float]:
    """Standard deviations of ordinary weights, and of those that write to the residual stream."""
    if width < _LIVELY_BELOW_WIDTH:
        lively = float(width**-0.5)
        return lively, lively
    # GPT-2's own rule: one residual write for attention and one for the MLP of each block.
    return _STD, float(_STD / (2 * layers) ** 0.5)
