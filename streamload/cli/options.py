"""Options that commands share, spelled as the library's keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamload.cli.errors import note_flag, traceback_option
from streamload.cli.types import BLOCK_BYTES, BYTES, DEVICE, DTYPE, INDICES

F = TypeVar("F", bound=Callable[..., Any])

dtype_option = click.option(
    "--dtype", type=DTYPE, help="Cast floating-point tensors: bfloat16, float16, ..."
)
chunk_bytes_option = click.option(
    "--chunk-bytes", type=BLOCK_BYTES, help="How much one read brings, like 4MiB."
)
max_shard_bytes_option = click.option(
    "--max-shard-bytes", type=BYTES, help="Split into files of at most this size."
)

_LOAD_OPTIONS = (
    dtype_option,
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
    chunk_bytes_option,
    click.option("--layers", type=INDICES, help="Only these blocks, like 0,1,5-7."),
    click.option("--prefix", help="Only names that start with it; it is removed."),
    click.option(
        "--strict/--no-strict",
        default=None,
        help="Refuse missing, unexpected or misshapen tensors. [default: strict]",
    ),
    click.option(
        "--check-memory/--no-check-memory",
        default=None,
        help="Refuse what does not fit in memory. [default: check]",
    ),
    click.option(
        "--ties",
        type=click.Choice(("refuse", "keep")),
        help="What to do if tied weights differ in the file. [default: refuse]",
    ),
    click.option(
        "--overflow",
        type=click.Choice(("report", "refuse")),
        help="What to do if a cast makes infinities. [default: report]",
    ),
    click.option(
        "--replicas",
        type=click.Choice(("refuse", "average")),
        help="What to do if partitions that must agree differ. [default: refuse]",
    ),
    click.option("--cache/--no-cache", default=None, help="Keep a converted copy and use it."),
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
    """``--json`` (the command takes ``as_json``), and ``--traceback`` after a command's name."""
    return click.option(
        "as_json", "--json", is_flag=True, callback=note_flag, help="Print JSON on stdout."
    )(traceback_option(function))
