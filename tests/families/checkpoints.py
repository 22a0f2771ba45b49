"""Tiny random models of every family, saved by transformers once per session."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import nn
from transformers import LlamaConfig

from tests.families.architectures import ARCHITECTURES, GROUPED
from tests.models.peers import build_pair

FAMILIES = {name: make for row in ARCHITECTURES.values() for name, make in row.checkpoints.items()}
OTHERS = {"plain-llama": lambda: LlamaConfig(**GROUPED, rope_theta=500.0)}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, the transformers model it was saved from, and ours filled by hand."""

    folder: Path
    peer: nn.Module
    expected: nn.Module


@cache
def saved(name: str, root: Path) -> Saved:
    peer, expected = build_pair({**FAMILIES, **OTHERS}[name]())
    folder = root / name
    peer.save_pretrained(folder)
    return Saved(folder, peer, expected)
