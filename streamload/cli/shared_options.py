"""Options that commands share, spelled as the library's keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamload import __version__
from streamload.cli.failures import note_flag, quiet_option, traceback_option
from streamload.cli.types import BLOCK_BYTES, BYTES, DEVICE, DTYPE, INDICES, SECONDS

LAYOUTS = ("fsdp", "tp")

F = TypeVar("F", bound=Callable[..., Any])


def _choice(name: str, values: tuple[str, ...], text: str) -> Callable[[F], F]:
    return click.option(name, type=click.Choice(values), help=text)


def _switch(name: str, text: str) -> Callable[[F], F]:
    """``--NAME/--no-NAME``; neither leaves the library's default."""
    return click.option(f"--{name}/--no-{name}", default=None, help=text)


dtype_option = click.option(
    "--dtype", type=DTYPE, help="Cast floating-point tensors: bfloat16, float16, ..."
)
workers_option = click.option(
    "--workers", type=click.IntRange(min=1), help="Threads that read and cast."
)
chunk_bytes_option = click.option(
    "--chunk-bytes", type=BLOCK_BYTES, help="How much one read brings, like 4MiB."
)
max_shard_bytes_option = click.option(
    "--max-shard-bytes", type=BYTES, help="Split into files of at most this size."
)
prefix_option = click.option("--prefix", help="Only names that start with it; it is removed.")
_REACH_OPTIONS = (
    click.option(
        "--timeout-s",
        type=SECONDS,
        help="How long to wait for what a server was asked for, all attempts (default 60), and for "
        "a sign of another rank (300).",
    ),
    click.option(
        "--no-download",
        "download",
        flag_value=False,
        default=None,
        help="Stream hf:ORG/NAME from the hub if it is not in the local cache.",
    ),
)
_MODES = (
    "stream: memory of its own. map: views of the file, ready at once. auto: map where that is "
    "safe, else stream. [default: auto]"
)
_WHICH_LAYOUT = "Of transposed weights. [default: what is fastest; contiguous when streaming]"
adapter_option = click.option(
    "--adapter",
    multiple=True,
    metavar="PATH",
    help="A LoRA adapter of PEFT, merged into the weights; may be given several times.",
)
_LOAD_OPTIONS = (
    dtype_option,
    click.option("--device", type=DEVICE, help="cpu, cuda:0, or MODULE=DEVICE,... [default: cpu]"),
    _choice("--mode", ("auto", "stream", "map"), _MODES),
    _choice("--layout", ("contiguous", "stored"), _WHICH_LAYOUT),
    workers_option,
    chunk_bytes_option,
    click.option(
        "--ring-bytes", type=BLOCK_BYTES, help="Host memory on the way to a device, like 192MiB."
    ),
    click.option("--layers", type=INDICES, help="Only these blocks, like 0,1,5-7."),
    prefix_option,
    _switch("strict", "Refuse missing, unexpected or misshapen tensors. [default: strict]"),
    _switch("check-memory", "Refuse what does not fit in memory. [default: check]"),
    _choice("--ties", ("refuse", "keep"), "If tied weights differ in the file. [default: refuse]"),
    _choice("--overflow", ("report", "refuse"), "If a cast makes infinities. [default: report]"),
    _choice("--replicas", ("refuse", "average"), "If partitions differ. [default: refuse]"),
    _switch("cache", "Keep a converted copy and use it."),
    _choice("--quantize", ("int8",), "Quantise linear layers while they stream in (weight only)."),
    adapter_option,
    *_REACH_OPTIONS,
)


def shard_option(ranks: bool = False) -> Callable[[F], F]:
    """``--shard fsdp|tp``, and ``--ranks N`` for a command that runs on none."""

    def decorate(function: F) -> F:
        if ranks:
            function = click.option(
                "--ranks",
                type=click.IntRange(1, 1024),
                help="How many ranks --shard is planned for; none of them is needed.",
            )(function)
        text = "Cut the model over ranks: fsdp by rows; tp is tensor parallelism."
        return _choice("--shard", LAYOUTS, text)(function)

    return decorate


def load_options(function: F) -> F:
    """The options of ``streamload.load``; the command takes them as ``**options``."""
    for option in reversed(_LOAD_OPTIONS):
        function = option(function)
    return function


def reach_options(function: F) -> F:
    """``--timeout-s`` and ``--no-download``; the command takes ``timeout_s`` and ``download``."""
    for option in reversed(_REACH_OPTIONS):
        function = option(function)
    return function


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the others keep the library's own defaults."""
    return {name: value for name, value in options.items() if value is not None}


def common_options(function: F) -> F:
    """``--json`` (the command takes ``as_json``), and what is noted for whoever prints:
    ``--quiet`` and ``--traceback`` after a command's name; ``--version`` works there too.
    """
    for option in (traceback_option, quiet_option, version_option(hidden=True)):
        function = option(function)
    return click.option(
        "as_json", "--json", is_flag=True, callback=note_flag, help="Print JSON on stdout."
    )(function)


def version_option(*, hidden: bool) -> Callable[[F], F]:
    return click.version_option(__version__, prog_name="streamload", hidden=hidden)
