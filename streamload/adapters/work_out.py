"""Works out what all tensors of an adapter do to its base; everything wrong is collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamload.adapters.experts import expert_names, merge_parameters
from streamload.adapters.merge import Merge, fits, merge_low_rank, orientation_of, values_dtype
from streamload.adapters.renaming import Renaming
from streamload.adapters.settings import AdapterSettings
from streamload.adapters.tensors import Adapted, AdapterTensors, sort_tensors
from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Catalog, TensorSpec, numel
from streamload.core.wording import plural
from streamload.decoding.overlaid import Added, Replaced, RowsReplaced

# Layers that may be tied to the embedding, and then have no tensor of their own in files.
_HEADS = ("lm_head", "embed_out")
# Where transformers has Conv1D, whose weights are [inputs, outputs], and what these are called.
_CONV1D = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"))
_CONV1D_LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")


def work_out(
    label: str,
    settings: AdapterSettings,
    stored: Catalog,
    base: Catalog,
    config: Mapping[str, Any],
) -> Merge:
    """What becomes of the base's tensors.

    Args:
        label: of the adapter; see Merge.
        settings: of the adapter.
        stored: the adapter's catalog.
        base: the base's.
        config: the base's, as in ``config.json``, or {}.
    """
    tensors = sort_tensors(stored)
    rename = Renaming(_wanted(settings, tensors), base)
    merge = Merge(label, settings, stored, base, config, rename)
    merge.problems += [f"{name!r} says the same as another tensor" for name in tensors.twice]
    merge.problems += [f"{name!r} is no tensor of an adapter" for name in tensors.foreign]
    for name, own in tensors.wholes.items():
        _replace_whole(merge, name, own)
    for module, own in tensors.rows.items():
        _replace_rows(merge, module, own)
    modules: dict[str, list[Adapted]] = {}
    for one in tensors.adapted.values():
        if _is_complete(merge, one):
            modules.setdefault(one.module, []).append(one)
    known = _known_orientation(merge, modules)
    for module, nested in modules.items():
        _merge_module(merge, module, nested, known)
    for name, found in rename.doubtful.items():
        merge.problems.append(f"{name!r} may be {' or '.join(map(repr, found))} of the base")
    return merge


def _wanted(settings: AdapterSettings, tensors: AdapterTensors) -> set[str]:
    """Names of the base's tensors as the adapter's modules have them."""
    names = {*tensors.wholes, *(f"{module}.weight" for module in tensors.rows)}
    for one in tensors.adapted.values():
        names.add(f"{one.module}.weight")
        if settings.target_parameters:
            names.update(expert_names(one.module))
    return names


def _replace_whole(merge: Merge, name: str, own: str) -> None:
    """A tensor that was trained as a whole takes the place of the base's, or is added to these."""
    part = merge.part(own)
    found = merge.rename(name)
    if found is None:
        is_head = any(f".{name}".endswith(f".{head}.weight") for head in _HEADS)
        if not (is_head or merge.settings.is_saved_whole(name)):
            merge.problems.append(f"{own!r} is for no tensor of the base")
            return
        merge.keep(_replaced(replace(part, name=merge.rename.new_name(name)), part), "added")
        return
    spec = merge.of_base(found)
    if spec.shape[1:] != part.shape[1:] or (spec.shape != part.shape and len(spec.shape) != 2):
        merge.problems.append(
            f"{own!r} has shape {list(part.shape)}, {found!r} of the base {list(spec.shape)}"
        )
        return
    if spec.shape != part.shape:
        merge.notices.append(f"{found!r} gets {part.shape[0]} rows instead of {spec.shape[0]}")
    merge.keep(_replaced(spec, part), "replaced")


def _replaced(spec: TensorSpec, part: TensorSpec) -> TensorSpec:
    encoding = Replaced((part,), BY_NAME[part.dtype].name, spec.made_dtype)
    is_float = BY_NAME[part.dtype].kind == "float"
    widest = "F64" if "F64" in (part.dtype, spec.made_dtype) else "F32"
    dtype = widest if is_float else part.dtype
    return TensorSpec(spec.name, dtype, part.shape, spec.file, encoding=encoding)


def _replace_rows(merge: Merge, module: str, own: str) -> None:
    """Trained rows of an embedding (``trainable_token_indices``)."""
    found = merge.rename(f"{module}.weight")
    if found is None:
        merge.problems.append(f"{own!r} is for no tensor of the base")
        return
    spec, part = merge.of_base(found), merge.part(own)
    indices = merge.settings.indices_of(module)
    rows = (len(indices), *spec.shape[1:])
    is_matrix = len(spec.shape) == 2 and spec.strides is None
    if not is_matrix or part.shape != rows or max(indices, default=0) >= spec.shape[0]:
        merge.problems.append(
            f"{own!r} {list(part.shape)} does not fit {found!r} {list(spec.shape)} of the base and "
            f"trainable_token_indices, which are {plural(len(indices), 'row')}"
        )
        return
    if not merge.are_numbers(spec, part):
        return
    encoding = RowsReplaced(
        (merge.base_part(spec), part),
        spec.stored_dtype,
        spec.made_dtype,
        columns=spec.shape[1],
        indices=indices,
    )
    made = replace(spec, dtype=values_dtype(spec), extent=None, encoding=encoding)
    merge.keep(made, f"rows replaced({len(indices)})")


def _is_complete(merge: Merge, one: Adapted) -> bool:
    """True if a module has all that a product takes; else that is a problem."""
    first = next(iter(one.parts.values()))
    lead = f"{first!r}: "
    absent = [f"no lora_{letter}" for letter in "AB" if letter not in one.parts]
    if "bias of A" in one.parts:
        absent.append("a bias of lora_A, which is nothing that PEFT writes")
    if merge.settings.use_dora is not ("magnitude" in one.parts):
        has = "no" if merge.settings.use_dora else "a"
        absent.append(f"{has} lora_magnitude_vector, but use_dora is {merge.settings.use_dora}")
    if not absent:
        a, b = (merge.stored[one.parts[letter]].shape for letter in "AB")
        if min(len(a), len(b)) < 2 or a[0] != b[1] or 0 in (*a, *b) or numel(b) != b[0] * b[1]:
            absent.append(f"lora_A {list(a)} and lora_B {list(b)} have no rank in common")
    merge.problems += [lead + text for text in absent]
    return not absent


def _known_orientation(merge: Merge, modules: Mapping[str, list[Adapted]]) -> bool | None:
    """True if the adapted layers' rows are inputs, as far as those that are not square say."""
    found = set()
    for module, (one, *_) in modules.items():
        name = merge.rename(f"{module}.weight")
        if name is None or one.is_embedding:
            continue
        spec = merge.of_base(name)
        a, b = (merge.stored[one.parts[letter]].shape for letter in "AB")
        if len(spec.shape) == len(a) == 2:
            found.add(orientation_of(*spec.shape, b[0], a[1]))
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _merge_module(merge: Merge, module: str, nested: list[Adapted], known: bool | None) -> None:
    name = merge.rename(f"{module}.weight")
    if name is None and merge.settings.target_parameters:
        merge_parameters(merge, module, sorted(nested, key=lambda one: one.nest))
        return
    one = nested[0]
    if name is None or len(nested) > 1 or one.nest:
        last = module.rpartition(".")[2]
        tied = "; is it tied to the embedding?" if last in _HEADS else ""
        merge.problems.append(f"{one.parts['A']!r} is for no tensor of the base{tied}")
        return
    if merge.settings.leaves_out(module):
        text = "is for a layer that layers_to_transform of the configuration leaves out"
        merge.problems.append(f"{one.parts['A']!r} {text}")
        return
    spec, rank = merge.of_base(name), merge.stored[one.parts["A"]].shape[0]
    if rank != merge.settings.rank_of(module):
        told = f"the configuration says {merge.settings.rank_of(module)}"
        merge.problems.append(f"{one.parts['A']!r} has rank {rank}, {told}")
        return
    if not fits(merge, one, spec):
        return
    outputs = merge.stored[one.parts["B"]].shape[0]
    if "magnitude" in one.parts and numel(merge.stored[one.parts["magnitude"]].shape) != outputs:
        shape = merge.stored[one.parts["magnitude"]].shape
        merge.problems.append(
            f"{one.parts['magnitude']!r} {list(shape)} is not for {outputs} outputs"
        )
        return
    merge_low_rank(merge, one, spec, one.is_embedding or _is_by_inputs(merge, module, known))
    if one.is_embedding and _is_tied(merge):
        merge.notices.append(f"{name!r} is also the output layer, which gets the merged weight too")
    if "bias" in one.parts:
        _add_bias(merge, module, one)


def _is_by_inputs(merge: Merge, module: str, known: bool | None) -> bool:
    """Of a square matrix: True if its rows are inputs."""
    if merge.config.get("model_type") in _CONV1D:
        return module.rpartition(".")[2] in _CONV1D_LAYERS
    return merge.settings.fan_in_fan_out if known is None else known


def _is_tied(merge: Merge) -> bool:
    stored = {name.split(".")[-2] for name in merge.base if "." in name}
    return bool(merge.config.get("tie_word_embeddings", True)) and stored.isdisjoint(_HEADS)


def _add_bias(merge: Merge, module: str, one: Adapted) -> None:
    """``lora_bias``: scale times the bias of B is added to the base's bias."""
    found = merge.rename(f"{module}.bias")
    part = merge.part(one.parts["bias"])
    if found is None or merge.of_base(found).shape != part.shape:
        merge.problems.append(f"{one.parts['bias']!r} {list(part.shape)} fits no bias of the base")
        return
    spec = merge.of_base(found)
    if not merge.are_numbers(spec, part):
        return
    scale = merge.settings.scale_of(module)
    encoding = Added((merge.base_part(spec), part), spec.stored_dtype, spec.made_dtype, scale=scale)
    made = replace(spec, dtype=values_dtype(spec), extent=None, encoding=encoding)
    merge.keep(made, f"added(scale={scale:.6g})")
