"""``python -m bench compare | generate | scale``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import click

from bench import checkpoints, machine, tables
from bench.compare import Comparison, compare, write_lines
from bench.job import find_peers

DTYPES = click.Choice(["float32", "bfloat16", "float16", "stored"])


@click.group()
def main() -> None:
    """Measures loaders of checkpoints on this machine.

    Checkpoints and results go to $BENCH_DIR, or to bench-results/.
    """


def _which(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--workers", type=click.IntRange(1), help="Threads [default: all CPUs]."),
        click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True),
        click.option("--path", type=click.Path(exists=True), help="Your own checkpoint."),
        click.option("--model", default="gpt2", show_default=True, help="Made if not there."),
    ):
        function = option(function)
    return function


def _checkpoint(model: str, path: str | None) -> str:
    if path is not None:
        return path
    click.echo(f"checkpoint: {model}", err=True)
    try:
        return checkpoints.checkpoint(model)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="--model") from error


def _results(command: str) -> str:
    name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    return os.path.join(checkpoints.results_dir(), name)


def _dtype(name: str) -> str | None:
    return None if name == "stored" else name


@main.command("compare")
@_which
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each.")
@click.option("--limit-mb", type=click.IntRange(1), help="Memory of each process, MiB.")
@click.option("--peers", default="", help="Names, with commas between [default: all].")
@click.option("--peers-dir", type=click.Path(exists=True), multiple=True, help="Your own peers.")
@click.option("--timeout-s", type=float, default=600, show_default=True)
@click.option("--plot", is_flag=True, help="Draw time and memory as PNG files.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write one self-contained page.")
def compare_command(
    model: str,
    path: str | None,
    dtype: str,
    workers: int | None,
    rounds: int,
    cold: bool,
    limit_mb: int | None,
    peers: str,
    peers_dir: tuple[str, ...],
    timeout_s: float,
    plot: bool,
    html: str | None,
) -> None:
    """Every loader on one checkpoint, with the floor of this machine beside them."""
    try:
        chosen = find_peers([n for n in peers.split(",") if n], folders=peers_dir)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="--peers") from error
    asked = Comparison(
        path=_checkpoint(model, path),
        dtype=_dtype(dtype),
        workers=workers or machine.usable_cpus(),
        rounds=rounds,
        cold=cold,
        limit_bytes=limit_mb << 20 if limit_mb else None,
        timeout_s=timeout_s,
    )
    out = _results("compare")
    lines = write_lines(compare(asked, chosen, tell=lambda s: click.echo(s, err=True)), out)
    click.echo(tables.report(lines))
    click.echo(f"Raw figures: {out}")
    if plot:
        from bench import plots

        for picture in plots.save_all(lines, os.path.splitext(out)[0]):
            click.echo(f"Picture: {picture}")
    if html:
        from bench import page

        page.write(lines, html)
        click.echo(f"Page: {html}")


if __name__ == "__main__":
    main(prog_name="python -m bench")
