"""Mutations that know JSON: other types, huge numbers, keys twice, deep nesting, odd characters."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

__all__ = ["Pairs", "mutated", "parsed", "written"]


class Raw(str):
    """Text that stands in the JSON as it is."""


class Pairs(list):  # type: ignore[type-arg]
    """An object as [key, value] pairs, so that a key can stand there twice."""


def parsed(text: str | bytes) -> object:
    """JSON with objects as Pairs."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(list(p) for p in pairs))


def written(value: object) -> str:
    """JSON text; Raw as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


_NUMBERS = [
    -1, 0, 1, 2, 3, 8, 127, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    2**61 + 1, 0.5, 1.0, 1e308,
]  # fmt: skip
_RAWS = [
    "1e0", "-0", "-0.0", "1.0", "01", "+1", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    "0x10", "1_0", "9" * 25, "9" * 400, "9" * 5000, "1" + "0" * 308, "tru", "nul", "'x'", "",
    '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x01"', '"\\x41"', '"a',
    "[" * 50 + "]" * 50, "[" * 126 + "]" * 126, "[" * 127 + "]" * 127, "[" * 200 + "]" * 200,
    "[" * 3000 + "]" * 3000, '{"a":' * 100_000, "[" * 100_000, '{"a":1,"a":2}', '{"a":' * 130 +
    "1" + "}" * 130, "// x", "/* */1", '"\x7f"', '"﻿"',
]  # fmt: skip
_WORDS = ["", "F32", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "C64", "f32", "F13", "U8 "]
_NAMES = [
    "a.weight", "b", "w", "", "__metadata__", "__metadata__ ", "dtype", "shape", "data_offsets",
    "weight_map", "é" * 40, "x" * 9000, "重み", "\n", "one.safetensors", "two.safetensors",
    "../one.safetensors", "/etc/passwd", "one.safetensors/", "./one.safetensors", "a\0b", ".",
    "three.safetensors", "ONE.safetensors", "C:one", "file://one", "sub/one.safetensors",
]  # fmt: skip


def _odd(rng: Random) -> object:
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(_NUMBERS)
        case 2:
            return Raw(rng.choice(_RAWS))
        case 3:
            return rng.choice([None, True, False, [], Pairs(), [[]], [1], [2, 3], [0] * 70])
        case 4:
            return rng.choice(_WORDS)
        case _:
            return rng.choice(_NAMES)


_Place = tuple[list[Any], int]


def _places(value: object) -> list[_Place]:
    """Every (container, index) below ``value``: of a pair both halves, of a list each item."""
    found: list[_Place] = []
    if isinstance(value, Pairs):
        for pair in value:
            found += [(pair, 0), (pair, 1), *_places(pair[1])]
    elif isinstance(value, list):
        for at, part in enumerate(value):
            found += [(value, at), *_places(part)]
    return found


def _objects(value: object) -> list[Pairs]:
    """Every object with entries."""
    below = [part for holder, at in _places(value) if isinstance(part := holder[at], Pairs)]
    return [part for part in (value, *below) if isinstance(part, Pairs) and part]


def mutated(value: object, rng: Random) -> object:
    """``value`` changed in one place (in the given object)."""
    places = _places(value)
    if not places or rng.random() < 0.02:
        return _odd(rng)
    numbers = [(h, i) for h, i in places if type(h[i]) is int]
    words = [(h, i) for h, i in places if isinstance(h[i], str)]
    owner = rng.choice(_objects(value) or [Pairs([["x", 1]])])
    holder, at = rng.choice(places)
    match rng.choice(["odd", "odd", "number", "number", "twice", "again", "new", "copy", "order",
                      "drop", "word"]):  # fmt: skip
        case "odd":
            holder[at] = _odd(rng)
        case "number" if numbers:
            holder, at = rng.choice(numbers)
            holder[at] = rng.choice([holder[at] + step for step in (-8, -4, -1, 1, 4, 8)])
        case "twice":
            owner.append([rng.choice(owner)[0], _odd(rng)])
        case "again":
            owner.insert(rng.randrange(len(owner) + 1), list(rng.choice(owner)))
        case "new":
            owner.insert(rng.randrange(len(owner) + 1), [rng.choice(_NAMES), _odd(rng)])
        case "copy":
            other, to = rng.choice(places)
            holder[at] = copy.deepcopy(other[to])
        case "order":
            rng.shuffle(owner)
        case "drop":
            del owner[rng.randrange(len(owner))]
        case _ if words:
            holder, at = rng.choice(words)
            holder[at] = rng.choice(_WORDS + _NAMES)
    return value
