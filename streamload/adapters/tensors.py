"""What the tensors of an adapter are, by the names that PEFT writes.

``base_model.model.`` comes first, the base model's own name of a module next. Then comes
``lora_A.weight``, ``lora_B.weight``, ``lora_B.bias``, ``lora_embedding_A``, ``lora_embedding_B`` or
``lora_magnitude_vector``; before it a ``base_layer`` for each parameter of the same module that is
adapted further out. All else is a whole tensor under its name in the base model, with
``base_layer`` in it where its module is adapted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_PREFIX = "base_model.model."
_LORA = re.compile(
    r"(?P<module>.+?)(?P<nest>(\.base_layer)*)\."
    r"(?P<part>lora_[AB](\.\w+)?\.(weight|bias)|lora_embedding_[AB](\.default)?|"
    r"lora_magnitude_vector(\.default)?(\.weight)?)"
)
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.default)?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save(\.default)?\.(?P<leaf>.+)")
_WRAPPED = re.compile(r"(?P<module>.+?)(\.base_layer)+\.(?P<leaf>\w+)")


@dataclass
class Adapted:
    """The adapter's tensors of one module, or of one of its parameters, by their stored names.

    Attributes:
        module: the base model's name.
        nest: how many parameters of the module are adapted further out.
        parts: ``A``, ``B``, ``bias`` (of B), ``magnitude``.
        is_embedding: of an embedding by its kind.
    """

    module: str
    nest: int = 0
    parts: dict[str, str] = field(default_factory=dict)
    is_embedding: bool = False


@dataclass
class AdapterTensors:
    """An adapter's tensors, sorted.

    Attributes:
        adapted: those of LoRA.
        wholes: the base model's tensor → the one that takes its place.
        rows: an embedding → the one that holds its trained rows.
        twice: names that say the same as another.
        foreign: names that PEFT would not look at.
    """

    adapted: dict[tuple[str, int], Adapted] = field(default_factory=dict)
    wholes: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def sort_tensors(names: Iterable[str]) -> AdapterTensors:
    """Say of each tensor what it is."""
    found = AdapterTensors()
    for name in names:
        bare = name.removeprefix(_PREFIX)
        if match := _LORA.fullmatch(bare):
            nest = match["nest"].count(".base_layer")
            key = (match["module"], nest)
            one = found.adapted.setdefault(key, Adapted(*key))
            _keep(found, one.parts, _part(match["part"]), name)
            one.is_embedding |= "lora_embedding" in match["part"]
        elif match := _TOKENS.fullmatch(bare):
            _keep(found, found.rows, match["module"], name)
        elif match := _SAVED.fullmatch(bare) or _WRAPPED.fullmatch(bare):
            _keep(found, found.wholes, f"{match['module']}.{match['leaf']}", name)
        elif bare != name:
            _keep(found, found.wholes, bare, name)
        else:
            found.foreign.append(name)
    return found


def _part(text: str) -> str:
    if text.startswith("lora_magnitude_vector"):
        return "magnitude"
    letter = text.removeprefix("lora_").removeprefix("embedding_")[0]
    return letter if not text.endswith(".bias") else {"B": "bias"}.get(letter, "bias of A")


def _keep(found: AdapterTensors, into: dict[str, str], key: str, name: str) -> None:
    if key in into:
        found.twice.append(name)
    into[key] = name
