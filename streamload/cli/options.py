"""Options that commands share, spelled as the library's keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

__all__ = ["BYTES", "INDICES", "json_option", "traceback_option"]

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not subscriptable before click 8.2

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", 1)}


class ByteSize(_ParamType):
    """A number of bytes: ``4194304``, ``4MiB``, ``4M``, ``1.5GB``; binary units have an i."""

    name = "bytes"

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


BYTES = ByteSize()
INDICES = Indices()


def json_option(function: F) -> F:
    """``--json``."""
    return click.option("as_json", "--json", is_flag=True, help="Print JSON on stdout.")(function)


def traceback_option(function: F) -> F:
    """``--traceback``, for those who write it after the command's name."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().meta["streamload.traceback"] = True

    option = click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of a failure.",
    )
    return option(function)
