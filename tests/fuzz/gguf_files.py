"""GGUF files of every kind that mutations start from, and mutations by what the format means."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.fuzz.files import mutated_bytes
from tests.support.gguf_bytes import array, header, info, pair, text
from tests.support.gguf_files import DRAWN, raw_blocks

__all__ = ["gguf_seeds", "mutated_gguf"]

_NUMBERS = [0, 1, 2, 3, 31, 32, 33, 255, 256, 2**15, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]
_NAMES = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


@dataclass
class _File:
    """The parts of a file, each of which can be changed by itself."""

    pairs: list[tuple[str, int, bytes]]
    infos: list[tuple[str, list[int], int, int]] = field(default_factory=list)
    body: bytes = b""
    version: int = 3
    alignment: int = 32

    def add(self, name: str, dims: list[int], kind: int, data: bytes) -> None:
        """A tensor at the next aligned byte; ``dims`` columns first."""
        self.infos.append((name, dims, kind, len(self.body)))
        self.body += data.ljust(-(-len(data) // self.alignment) * self.alignment, b"\0")

    def written(self) -> bytes:
        made = header(
            [pair(*one) for one in self.pairs],
            [info(*one) for one in self.infos],
            version=self.version,
        )
        return made.ljust(-(-len(made) // self.alignment) * self.alignment, b"\0") + self.body


def _seed(which: int) -> _File:
    made = _File(
        [
            ("general.architecture", 8, text("made-up")),
            ("general.alignment", 4, struct.pack("<I", 32)),
            ("a.texts", 9, array(8, 3, text("x") + text("") + text("größe"))),
            ("a.numbers", 9, array(5, 2, struct.pack("<2i", 7, -7))),
            ("a.flag", 7, b"\1"),
            ("a.float", 6, struct.pack("<f", 0.5)),
            ("a.long", 11, struct.pack("<q", -5)),
        ]
    )
    random = np.random.default_rng(which)
    made.add("f32", [3, 2], 0, np.arange(6, dtype="<f4").tobytes())
    made.add("f16", [4], 1, np.arange(4, dtype="<f2").tobytes())
    made.add("i8", [2, 1, 2], 24, bytes([1, 2, 255, 0]))
    if which:
        blocks = random.integers(0, 256, (4, 34), dtype=np.uint8)
        blocks[:, :2] = (random.random(4) * 0.01).astype("<f2").view(np.uint8).reshape(4, 2)
        made.add("q8.weight", [64, 2], 8, blocks.tobytes())
        name = DRAWN[which % len(DRAWN)]
        made.add("k.weight", [256, 2], _NAMES[name], raw_blocks(name, (2, 256), which).tobytes())
    return made


def gguf_seeds() -> list[int]:
    """Numbers of the legal files."""
    return [0, 1, 2, 3, 4, 5]


def seed_bytes(which: int) -> bytes:
    return _seed(which).written()


def mutated_gguf(which: int, rng: Random) -> bytes:
    """A file of which some parts are others; or bytes of it, most of them in its header."""
    made = _seed(which)
    if rng.random() < 0.4:
        data = made.written()
        return mutated_bytes(data, rng, stop=rng.choice([24, len(data) - len(made.body), None]))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _change(made, rng)
    data = made.written()
    match rng.randrange(12):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return data + bytes(rng.randrange(1, 80))
    return data


def _change(made: _File, rng: Random) -> None:
    if made.infos and rng.random() < 0.55:
        at = rng.randrange(len(made.infos))
        name, dims, kind, offset = made.infos[at]
        number = rng.choice(_NUMBERS)
        match rng.randrange(8):
            case 0:
                name = rng.choice(["", "f32", "q8.weight", "x" * 70, "a\0b", "größe"])
            case 1:
                dims = dims[:-1]
            case 2:
                dims = [*dims, rng.choice([0, 1, 2])]
            case 3 if dims:
                dims = [*dims]
                dims[rng.randrange(len(dims))] = number
            case 4:
                kind = rng.choice([0, 1, 2, 8, 9, 14, 15, 16, 24, 28, 30, 31, 39, 77, 2**32 - 1])
            case 5:
                offset = rng.choice([*_NUMBERS, offset + 32, max(offset - 32, 0)])
            case 6:
                made.infos.insert(at, made.infos[rng.randrange(len(made.infos))])
            case _:
                del made.infos[at]
                return
        made.infos[at] = (name, dims, kind, offset)
        return
    if not made.pairs:
        return
    at = rng.randrange(len(made.pairs))
    key, kind, data = made.pairs[at]
    match rng.randrange(7):
        case 0:
            key = rng.choice(["", "a.flag", "general.alignment", "split.count", "k" * 300])
        case 1:
            kind = rng.choice([*range(14), 2**31])
        case 2:
            data = struct.pack("<Q", rng.choice(_NUMBERS)) + data[8:]
        case 3:
            data = struct.pack("<IQ", rng.choice([0, 5, 8, 9, 12]), rng.choice(_NUMBERS)) + data
        case 4:
            data = struct.pack("<I", rng.choice(_NUMBERS) & (2**32 - 1)) + data[4:]
        case 5:
            made.version = rng.choice([0, 1, 2, 3, 4, 0x03000000])
            return
        case _:
            del made.pairs[at]
            return
    made.pairs[at] = (key, kind, data)
