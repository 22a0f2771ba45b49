"""How option values are read: sizes, indices, token ids, devices, dtypes, names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from streamload.core.dtypes import BY_TORCH_NAME, parse_dtype
from streamload.core.options import seconds
from streamload.core.wording import suggestion

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not subscriptable before click 8.2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", 1)}
_FLOATS = tuple(name for name, dtype in BY_TORCH_NAME.items() if dtype.is_floating)


class Parsed(_ParamType):
    """A value that ``parse`` makes of the text; its ValueError is wrong usage.

    Attributes:
        name: what help shows as the value.
        choices: what the shell completes.
    """

    def __init__(
        self, name: str, parse: Callable[[str], object], choices: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.choices = tuple(choices)
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(name) for name in self.choices if name.startswith(incomplete)]


def _size(text: str) -> int:
    """Bytes of ``4194304``, ``4MiB``, ``4M`` or ``1.5GB``; binary units have an i."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size like 4194304, 4MiB or 1.5GB")
    return size


def _block_size(text: str) -> int:
    size = _size(text)
    if size < 4096:  # a smaller read costs more in calls than in bytes
        raise ValueError(f"{text!r} is too small: use at least 4096 bytes")
    return size


def number(*, above: float | None = None, least: float = 0.0, most: float | None = None) -> Parsed:
    """A finite number; click's own range lets NaN pass, which is neither too small nor too large.

    Args:
        above: more than this; or
        least: this or more; and
        most: this or less.
    """
    low = f"above {above:g}" if above is not None else f"{least:g} or more"
    wanted = low if most is None else f"{low} and at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_low = value <= above if above is not None else value < least
        if not math.isfinite(value) or is_low or (most is not None and value > most):
            raise ValueError(f"{text!r} is not a number {wanted}")
        return value

    return Parsed("number", parse)


def _size_or_none(text: str) -> int | str:
    return "none" if text.lower() == "none" else _size(text)


def _indices(text: str) -> list[int]:
    """Those of ``0,1,5-7`` in the order given, each once."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of indices like 0,1,5-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()!r} counts down")
        found.update(dict.fromkeys(range(first, last + 1)))
    return list(found)


def _tokens(text: str) -> list[int]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is not a list of token ids like 1,2,3")
    return [int(part) for part in parts]


def _device(text: str) -> str | dict[str, str]:
    """One device, or a dict of module prefix to device: ``tok_embed=cpu,blocks=cuda:0``."""
    if "=" not in text:
        return text
    pairs = [part.split("=", 1) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{text!r} mixes devices with MODULE=DEVICE pairs")
    return {module.strip(): device.strip() for module, device in pairs}


def _seconds(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    return seconds("it", found)


def dtype_among(names: Sequence[str]) -> Parsed:
    """A floating-point dtype by torch's name; short forms (bf16, fp16) are understood."""

    def parse(text: str) -> str:
        choices = f"; choose one of {', '.join(names)}"
        try:
            dtype = parse_dtype(text)
        except ValueError:
            raise ValueError(f"unknown dtype {text!r}{choices}") from None
        if dtype is None or not dtype.is_floating or dtype.torch_name is None:
            raise ValueError(f"{text!r} is not a floating-point type of torch{choices}")
        if dtype.torch_name not in names:
            raise ValueError(f"{text!r} cannot be used here{choices}")
        return dtype.torch_name

    return Parsed("dtype", parse, names)


def one_of(names: Sequence[str]) -> Parsed:
    """One of many names; an unknown name gets a suggestion."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}{suggestion(text, names)}")
        return text

    return Parsed("name", parse, names)


BYTES = Parsed("bytes", _size)
BYTES_OR_NONE = Parsed("bytes|none", _size_or_none)
BLOCK_BYTES = Parsed("bytes", _block_size)
INDICES = Parsed("indices", _indices)
DEVICE = Parsed("device", _device)
DTYPE = dtype_among(_FLOATS)
SECONDS = Parsed("seconds", _seconds)
TOKENS = Parsed("ids", _tokens)
