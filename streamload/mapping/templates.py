"""Whole-segment name templates: ``h.{layer}.attn.c_attn.weight``.

``{layer}``, ``{expert}`` and ``{rank}`` stand for a whole number without leading zeros;
``{layer+2}`` for a file numbered two higher than its layer. Nothing is ever matched by substring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

_PLACE = re.compile(r"\{(layer|expert|rank)(?:\+([0-9]{1,9}))?\}")
_NUMBER = re.compile(r"([0-9]+)")
_PART = re.compile(r"(?<![^.])([0-9]+)(?![^.])")
# What a placeholder stands for: other digits than these are letters of a name, and no file has
# so many blocks that a longer number is one.
_MOST_DIGITS = 9
NUMBER = re.compile(rf"[0-9]{{1,{_MOST_DIGITS}}}")


def name_key(name: str, *, inside: bool = False) -> tuple[str, tuple[str, ...]]:
    """A name with each number replaced by ``#``, and the numbers.

    Only parts that are a number as a whole count (``h.0``, not ``ln_1``), so that the rules of a
    block have keys of their own; with ``inside`` every run of digits does.
    """
    parts = (_NUMBER if inside else _PART).split(name)
    return "#".join(parts[::2]), tuple(parts[1::2])


@dataclass(frozen=True)
class Template:
    """One template, compiled."""

    text: str

    def __post_init__(self) -> None:
        rest = _PLACE.sub("", self.text)
        if "{" in rest or "}" in rest:
            raise ValueError(
                f"template {self.text!r}: only {{layer}}, {{expert}} and {{rank}} (with +N) may "
                "stand in braces"
            )

    @cached_property
    def inside(self) -> bool:
        """True if a placeholder is but a piece of a name's part: ``layer_{layer+2}``."""
        pieces = (part for part in self.text.split(".") if _PLACE.search(part))
        return any(not _PLACE.fullmatch(part) for part in pieces)

    @cached_property
    def key(self) -> str:
        """What ``name_key`` gives for every name that may match."""
        return name_key(_PLACE.sub("0", self.text), inside=self.inside)[0]

    @cached_property
    def _slots(self) -> tuple[tuple[str, int] | str, ...]:
        """For each number of the key: a placeholder with its shift, or a literal."""
        marked = _PLACE.sub(lambda m: f"<{m[1]},{m[2] or 0}>", self.text)
        slots: list[tuple[str, int] | str] = []
        number = _NUMBER.pattern if self.inside else _PART.pattern
        for m in re.finditer(rf"<(layer|expert|rank),([0-9]+)>|{number}", marked):
            slots.append((m[1], int(m[2])) if m[1] else m[0])
        return tuple(slots)

    @cached_property
    def written_out(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Which numbers of the key are written out, and as what."""
        found = [(at, slot) for at, slot in enumerate(self._slots) if isinstance(slot, str)]
        return tuple(at for at, _ in found), tuple(slot for _, slot in found)

    def match(self, numbers: tuple[str, ...]) -> dict[str, int] | None:
        """Placeholder values for the numbers of a name with this key, or None."""
        slots = self._slots
        if len(numbers) != len(slots):  # a name may have the key's ``#`` itself
            return None
        found: dict[str, int] = {}
        for number, slot in zip(numbers, slots, strict=True):
            if isinstance(slot, str):
                if number != slot:
                    return None
                continue
            if len(number) > _MOST_DIGITS or (number[0] == "0" and number != "0"):
                return None
            which, shift = slot
            value = int(number) - shift
            if value < 0 or found.get(which, value) != value:
                return None
            found[which] = value
        return found

    def fill(
        self, *, layer: int | None = None, expert: int | None = None, rank: int | None = None
    ) -> str:
        """The name for one layer, expert and rank.

        Raises:
            ValueError: a value the template needs is None.
        """
        text, places = self._pieces
        for which, shift, literal in places:
            value = layer if which == "layer" else expert if which == "expert" else rank
            if value is None:
                raise ValueError(f"template {self.text!r} needs a {which}")
            text += f"{value + shift}{literal}"
        return text

    @cached_property
    def _pieces(self) -> tuple[str, tuple[tuple[str, int, str], ...]]:
        """What stands before the first placeholder; each one, its shift, and what follows it."""
        start, *rest = _PLACE.split(self.text)
        places = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        return start, tuple((which, int(shift or 0), text) for which, shift, text in places)

    def has(self, which: str) -> bool:
        """True if ``{layer}``, ``{expert}`` or ``{rank}`` stands in it."""
        return any(place == which for place, _shift, _text in self._pieces[1])


_NONE: Mapping[tuple[int, ...], Any] = MappingProxyType({})
_ByNumbers: TypeAlias = "dict[tuple[int, ...], dict[tuple[str, ...], list[tuple[Template, _T]]]]"


class TemplateIndex(Generic[_T]):
    """Which of many templates match a name, without trying them one by one."""

    def __init__(self) -> None:
        # Apart for templates with placeholders inside of a part and for all others: key → which
        # of the key's numbers are written out → those numbers → templates.
        self._tables: dict[bool, dict[str, _ByNumbers[_T]]] = {}

    def add(self, template: Template, value: _T) -> None:
        """Let names that match find ``value``."""
        by_numbers = self._tables.setdefault(template.inside, {}).setdefault(template.key, {})
        places, numbers = template.written_out
        by_numbers.setdefault(places, {}).setdefault(numbers, []).append((template, value))

    def find(self, name: str) -> list[tuple[_T, dict[str, int]]]:
        """What was added with templates that match, and their placeholders' values."""
        found = []
        for inside, table in self._tables.items():
            key, numbers = name_key(name, inside=inside)
            for places, templates in table.get(key, _NONE).items():
                written_out = tuple([numbers[at] for at in places if at < len(numbers)])
                for template, value in templates.get(written_out, ()):
                    values = template.match(numbers)
                    if values is not None:
                        found.append((value, values))
        return found
