"""Options that commands share, spelled as the library's keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamload.cli.types import BLOCK_BYTES, DEVICE, DTYPE, INDICES

__all__ = ["common_options", "given", "load_options"]

F = TypeVar("F", bound=Callable[..., Any])

_LOAD_OPTIONS = (
    click.option("--dtype", type=DTYPE, help="Cast floating-point tensors: bfloat16, float16, ..."),
    click.option("--device", type=DEVICE, help="cpu, cuda:0, or MODULE=DEVICE,... [default: cpu]"),
    click.option(
        "--mode",
        type=click.Choice(("stream", "map")),
        help="stream: memory of its own. map: views of the file, ready at once. [default: stream]",
    ),
    click.option(
        "--layout",
        type=click.Choice(("contiguous", "stored")),
        help="Of transposed weights. [default: contiguous when streaming, stored when mapping]",
    ),
    click.option("--workers", type=click.IntRange(min=1), help="Threads that read and cast."),
    click.option("--chunk-bytes", type=BLOCK_BYTES, help="Size of a block, like 4MiB."),
    click.option("--layers", type=INDICES, help="Only these blocks, like 0,1,5-7."),
    click.option("--prefix", help="Only names under it, taken off."),
    click.option(
        "--strict/--no-strict",
        default=None,
        help="Refuse anything missing, unexpected or misshapen. [default: strict]",
    ),
    click.option(
        "--check-memory/--no-check-memory",
        default=None,
        help="Refuse what does not fit in memory. [default: check]",
    ),
    click.option(
        "--ties",
        type=click.Choice(("refuse", "keep")),
        help="If tied weights differ in the file. [default: refuse]",
    ),
    click.option(
        "--overflow",
        type=click.Choice(("report", "refuse")),
        help="If a cast makes infinities. [default: report]",
    ),
    click.option(
        "--replicas",
        type=click.Choice(("refuse", "average")),
        help="If partitions that must agree differ. [default: refuse]",
    ),
    click.option("--cache/--no-cache", default=None, help="Keep and use a converted copy."),
    click.option(
        "--quantize",
        type=click.Choice(("int8",)),
        help="Quantise linear layers while they stream in (weight only).",
    ),
)


def load_options(function: F) -> F:
    """The options of ``streamload.load``; the command takes them as ``**options``."""
    for option in reversed(_LOAD_OPTIONS):
        function = option(function)
    return function


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the others keep the library's own defaults."""
    return {name: value for name, value in options.items() if value is not None}


def common_options(function: F) -> F:
    """``--json``, and ``--traceback`` for those who write it after the command's name.

    The command takes ``as_json``. Both are noted for the place where failures are reported.
    """

    def note(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta[f"streamload.{param.name}"] = True
        return value

    function = click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Show the traceback of a failure.",
    )(function)
    return click.option(
        "as_json", "--json", is_flag=True, callback=note, help="Print JSON on stdout."
    )(function)
