"""The way of one tensor from ``load`` to the module: written down, and short."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import streamload
from streamload.synthesis import synthesize

PACKAGE = Path(streamload.__file__).parent
DOCUMENT = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
STORED = "h.1.attn.c_attn.weight"
NAMES = {STORED, "blocks.1.attn.qkv.weight"}
SHAPES = {(64, 192), (192, 64)}  # of gpt2-tiny; no other tensor has them


def is_about_it(value: Any) -> bool:
    """True for the tensor's names, what describes it, and its memory."""
    if isinstance(value, str):
        return value in NAMES
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) in SHAPES
    if type(value).__name__ == "Destination":
        return tuple(value.tensor.shape) in SHAPES
    spec = getattr(value, "spec", None) or getattr(value, "_spec", None)
    one = [getattr(v, name, None) for v in (value, spec) for name in ("name", "stored_name")]
    many = [getattr(value, name, ()) for name in ("sources", "targets", "names")]
    found = [*one, *(name for names in many if isinstance(names, tuple) for name in names)]
    return any(isinstance(name, str) and name in NAMES for name in found)


def functions_that_are_handed_it(folder: Path) -> set[str]:
    """Functions of the package that got the tensor as an argument while it was loaded.

    Building the model is not part of its way; what is computed of a record (a property) is data.
    """
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = os.path.relpath(code.co_filename, PACKAGE)
        if (
            event != "call"
            or path.startswith(("..", "models"))
            or path.endswith("empty_weights.py")
        ):
            return
        if code.co_name.startswith("<"):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_about_it(frame.f_locals.get(name)) for name in arguments):
            found.add(f"{path} {code.co_name} {code.co_firstlineno}")

    streamload.load(folder, dtype="bfloat16")  # tables and templates are compiled once
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        streamload.load(folder, dtype="bfloat16")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_one_tensor_passes_few_functions(tmp_path: Path) -> None:
    synthesize("gpt2-tiny", tmp_path / "tiny", masks=False)
    found = functions_that_are_handed_it(tmp_path / "tiny")
    for step in ("place", "send", "read_into", "carry", "_like"):
        assert any(name.split()[1] == step for name in found), step
    assert len(found) <= 45, "\n".join(sorted(found))


def steps() -> Iterator[str]:
    part = DOCUMENT.partition("<!-- steps -->")[2].partition("<!-- /steps -->")[0]
    yield from re.findall(r"^\d+\. (.*(?:\n   .*)*)", part, flags=re.MULTILINE)


def test_the_way_is_written_down_in_at_most_fifteen_steps() -> None:
    assert 10 <= len(list(steps())) <= 15


def test_the_functions_that_the_steps_name_are_there() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for step in steps():
        for name in re.findall(r"`([a-z_]+)`", step):
            assert re.search(rf"\b{name}\b", source), f"{name!r} of step {step[:40]!r}"
