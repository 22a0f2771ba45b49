"""How options are read: sizes, indices, token ids, devices, dtypes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import click
from click.shell_completion import CompletionItem

from streamload.core.dtypes import BY_TORCH_NAME, parse_dtype

__all__ = [
    "BLOCK_BYTES",
    "BYTES",
    "DEVICE",
    "DTYPE",
    "INDICES",
    "TOKENS",
    "DTypeName",
    "OneOf",
]

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not subscriptable before click 8.2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", 1)}


_FLOATS = tuple(name for name, dtype in BY_TORCH_NAME.items() if dtype.is_floating)


class ByteSize(_ParamType):
    """A number of bytes: ``4194304``, ``4MiB``, ``4M``, ``1.5GB``; binary units have an i."""

    name = "bytes"

    def __init__(self, *, least: int = 1) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", value.lower())
        size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
        if size <= 0:
            self.fail(f"{value!r} is not a size like 4194304, 4MiB or 1.5GB", param, ctx)
        if size < self._least:
            self.fail(f"{value!r} is too small: at least {self._least} bytes", param, ctx)
        return size


class Indices(_ParamType):
    """Block indices: ``0,1,5-7``."""

    name = "indices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """The indices in the order given, each once."""
        if isinstance(value, list):
            return value
        found: dict[int, None] = {}
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
            if match is None:
                self.fail(f"{value!r} is not a list of indices like 0,1,5-7", param, ctx)
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                self.fail(f"{part.strip()!r} counts down", param, ctx)
            found.update(dict.fromkeys(range(first, last + 1)))
        return list(found)


class Tokens(_ParamType):
    """Token ids: ``1,2,3``."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """The ids in the order given."""
        if isinstance(value, list):
            return value
        parts = value.replace(",", " ").split()
        if not parts or not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of token ids like 1,2,3", param, ctx)
        return [int(part) for part in parts]


class Device(_ParamType):
    """One device, or ``MODULE=DEVICE`` pairs: ``tok_embed=cpu,blocks=cuda:0``."""

    name = "device"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | dict[str, str]:
        """The device, or a dict of module prefix to device."""
        if isinstance(value, dict) or "=" not in value:
            return cast("str | dict[str, str]", value)
        pairs = [part.split("=", 1) for part in value.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            self.fail(f"{value!r} mixes devices with MODULE=DEVICE pairs", param, ctx)
        return {module.strip(): device.strip() for module, device in pairs}


class DTypeName(_ParamType):
    """A floating-point dtype as torch spells it; short forms (bf16, fp16) are understood."""

    name = "dtype"

    def __init__(self, names: Sequence[str] = _FLOATS) -> None:
        self._names = tuple(names)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Those that are accepted here."""
        del ctx, param
        return [CompletionItem(name) for name in self._names if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Torch's name of the dtype."""
        try:
            found = parse_dtype(value)
        except ValueError:
            self.fail(f"unknown dtype {value!r}{self._choices()}", param, ctx)
        if found is None or not found.is_floating or found.torch_name is None:
            self.fail(
                f"{value!r} is not a floating-point type of torch{self._choices()}", param, ctx
            )
        if found.torch_name not in self._names:
            self.fail(f"{value!r} cannot be used here{self._choices()}", param, ctx)
        return found.torch_name

    def _choices(self) -> str:
        return f"; choose one of {', '.join(self._names)}"


class OneOf(_ParamType):
    """One of a set of names; a name that is none gets a suggestion."""

    name = "name"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names."""
        del ctx, param
        return [CompletionItem(name) for name in self._names if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name."""
        if value not in self._names:
            close = difflib.get_close_matches(str(value), self._names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            names = ", ".join(self._names)
            self.fail(f"{value!r} is not among {names}{hint}", param, ctx)
        return str(value)


BYTES = ByteSize()
# A read that brings less costs more in calls than in bytes.
BLOCK_BYTES = ByteSize(least=4096)
INDICES = Indices()
DEVICE = Device()
DTYPE = DTypeName()
TOKENS = Tokens()
