"""What changes the meaning of weights: adapters, quantisation, the head of another task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from streamload.core.findings import Finding
from streamload.core.wording import listed
from streamload.mapping.fields import quantisation
from streamload.planning.records import Plan

_CAUSAL = ("ForCausalLM", "LMHeadModel")
# Name parts of adapters that PEFT writes, and of heads of other tasks than language modelling.
_ADAPTER = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_HEADS = {
    "v_head": "a value head",
    "score": "the head of a classifier or reward model",
    "classifier": "the head of a classifier",
    "qa_outputs": "the head for answering questions",
}


def with_meanings(
    plan: Plan,
    config: Mapping[str, Any] | None,
    adapter: Mapping[str, Any] | None,
    targets: Collection[str] | None,
    *,
    is_causal: bool,
) -> Plan:
    """The plan; before all else it finds, what files beside the weights and odd names say.

    Args:
        plan: with everything else that is to be said.
        config: as in ``config.json``.
        adapter: as in ``adapter_config.json``, if there is one.
        targets: the module's names.
        is_causal: the module is a language model of ours.
    """
    texts: list[str] = []
    stored = [spec.name for spec in plan.stored.values()]
    lora = _with_part(stored, _ADAPTER)
    own = _with_part(targets or (), (*_ADAPTER, "base_layer"))
    must_refuse = bool(lora) and targets is not None and not own
    kind = str((adapter or {}).get("peft_type") or "LORA")
    base = (adapter or {}).get("base_model_name_or_path")
    of_base = f" of the base model {str(base)!r}" if base else ""
    if lora and not own:
        texts.append(
            f"this is, or holds, a PEFT adapter ({kind}{of_base}; {listed(map(repr, lora), 2)}), "
            "which is no model by itself: load its base model with adapter= (--adapter) and the "
            "adapter's folder, which merges the two"
        )
    elif adapter is not None and not own:
        texts.append(
            f"adapter_config.json beside the weights: a PEFT adapter ({kind}{of_base}) that is "
            "not applied; what is loaded is the base model alone. adapter= (--adapter) with that "
            "folder merges it"
        )
    elif own and not lora and not plan.ok:
        texts.append(
            f"the module is wrapped by PEFT ({listed(map(repr, own), 2)}), the checkpoint is not: "
            "load into the base model first, then wrap it"
        )
    if targets is None and (quantised := quantisation(config)):
        texts.append(
            f"the weights are quantised: config.json has {quantised}; stored values are taken as "
            "they are, without their scales; with dtype= they are decoded"
        )
    if not plan.ok or plan.unexpected or plan.missing:
        texts += _other_task(plan, config, is_causal=is_causal)
    refuses = must_refuse or not plan.ok
    leads = (Finding(text, refuses=refuses) for text in texts)
    return replace(plan, findings=(*leads, *plan.findings), meaning=tuple(texts))


def _other_task(plan: Plan, config: Mapping[str, Any] | None, *, is_causal: bool) -> Iterable[str]:
    found = (config or {}).get("architectures")
    names = [n for n in found if isinstance(n, str)] if isinstance(found, (list, tuple)) else []
    if names and not any(name.endswith(_CAUSAL) for name in names):
        what = "a causal language model is built here" if is_causal else "the module may be another"
        yield f"config.json: architectures says {listed(names, 3)}, but {what}"
    for part, head in _HEADS.items():
        if heads := _with_part(plan.unexpected, (part,)):
            yield f"the checkpoint has {head} ({listed(map(repr, heads), 2)}) that has no place"


def _with_part(names: Collection[str], parts: Collection[str]) -> list[str]:
    """The names that have one of ``parts`` between dots."""
    text = ".".join(names)  # one look through all of them at once; most have none
    wanted = {part for part in parts if part in text}
    return [name for name in names if not wanted.isdisjoint(name.split("."))] if wanted else []
