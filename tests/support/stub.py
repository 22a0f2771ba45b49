"""``streamload/__init__.pyi``: what editors and type checkers see, made of the running package.

Editors that do not follow ``Unpack[LoadOptions]`` (those that use Jedi) complete options by it, and
all of them show its docstrings. ``python -m tests.support.stub`` writes it anew.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import streamload
from streamload.core.options import LoadOptions
from streamload.loading.transformers_load import TransformersOptions

PATH = Path(streamload.__file__).with_suffix(".pyi")
_HEAD = '''"""Made by ``python -m tests.support.stub``; a test holds it to the package."""

# ruff: noqa: I001

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

{imports}

__version__: str
__all__: list[str]
'''


def text() -> str:
    """The stub, as ``ruff format`` would have it."""
    functions = [name for name in streamload.__all__ if _shows_options(name)]
    homes: dict[str, list[str]] = {}
    for home, names in streamload._HOMES.items():
        kept = [name for name in names.split() if name not in functions]
        if kept:
            homes.setdefault(f"streamload.{home}", []).extend(kept)
    for name in (
        "Device",
        "Layout",
        "Mode",
        "Overflow",
        "Progress",
        "Quantize",
        "Replicas",
        "Ties",
    ):
        homes["streamload.core.options"].append(name)
    homes["streamload.mapping.binding"] = ["Mapper"]
    homes["streamload.module.commit"] = ["OnAssign"]
    public = set(streamload.__all__)
    imports = "\n".join(
        f"from {home} import {name} as {name}" if name in public else f"from {home} import {name}"
        for home in sorted(homes)
        for name in sorted(homes[home])
    )
    return _HEAD.format(imports=imports) + "".join(map(_function, functions))


def _shows_options(name: str) -> bool:
    value = getattr(streamload, name)
    return inspect.isfunction(value) and "Unpack" in str(value.__annotations__.get("options"))


def _function(name: str) -> str:
    function = getattr(streamload, name)
    texts = {**TransformersOptions.__annotations__, **LoadOptions.__annotations__}
    lines, is_keyword = [f"\ndef {name}("], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            lines.append("    *,")
            is_keyword = True
        annotation = function.__annotations__.get(parameter.name)
        if annotation is None:
            annotation = getattr(texts[parameter.name], "__forward_arg__", "")
        has_default = parameter.default is not parameter.empty
        default = f" = {_source(parameter.default)}" if has_default else ""
        lines.append(f"    {parameter.name}: {annotation}{default},")
    lines.append(f") -> {function.__annotations__['return']}:")
    doc = inspect.getdoc(function) or ""
    body = textwrap.indent(f'"""{doc}\n"""', "    ")
    return "\n".join([*lines, re.sub(r"[ ]+$", "", body, flags=re.MULTILINE)]) + "\n"


def _source(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
