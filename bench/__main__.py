"""``python -m bench compare | generate | scale``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import click

from bench import checkpoints, machine, tables
from bench.compare import Comparison, compare, write_lines
from bench.job import Peer, find_peers

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
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


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
    chosen = _peers(peers, peers_dir)
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
    lines = write_lines(compare(asked, chosen, tell=_tell), out)
    click.echo(tables.report(lines))
    click.echo(f"Raw figures: {out}")
    if plot:
        for picture in _plots().save_all(lines, os.path.splitext(out)[0]):
            click.echo(f"Picture: {picture}")
    if html:
        _plots()
        from bench import page

        page.write(lines, html)
        click.echo(f"Page: {html}")


@main.command("generate")
@click.option("--model", default="gpt2", show_default=True, help="Made if not there.")
@click.option("--path", type=click.Path(exists=True), help="Your own checkpoint.")
@click.option(
    "--dtype",
    "dtypes",
    type=DTYPES,
    multiple=True,
    default=("float32", "bfloat16"),
    show_default=True,
)
@click.option("--tokens", "count", type=click.IntRange(2), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--workers", type=click.IntRange(1), help="Threads [default: all CPUs].")
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each.")
@click.option("--timeout-s", type=float, default=1200, show_default=True)
def generate_command(
    model: str,
    path: str | None,
    dtypes: tuple[str, ...],
    count: int,
    rounds: int,
    workers: int | None,
    cold: bool,
    timeout_s: float,
) -> None:
    """From the start of the process to the first token, and to the last."""
    from bench import generate

    path = _checkpoint(model, path)
    out = _results("generate")
    measured = generate.generate(
        path,
        [_dtype(name) for name in dtypes],
        generate.generators(),
        count=count,
        rounds=rounds,
        workers=workers or machine.usable_cpus(),
        vocabulary=checkpoints.vocabulary_of(path),
        cold=cold,
        timeout_s=timeout_s,
        tell=_tell,
    )
    click.echo(generate.report(write_lines(measured, out)))
    click.echo(f"Raw figures: {out}")


MODELS = ("gpt2-tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@main.command("scale")
@click.option("--largest", type=click.Choice(MODELS), default="gpt2-xl", show_default=True)
@click.option("--most-tensors", type=click.IntRange(100), default=100_000, show_default=True)
@click.option("--holes/--no-holes", default=True, help="Plan and map 20 billion parameters.")
@click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--workers", type=click.IntRange(1), help="Threads [default: all CPUs].")
@click.option(
    "--peers",
    default="floor_cast,streamload_stream,streamload_stored,transformers",
    show_default=True,
    help="Names, with commas between.",
)
@click.option("--plot", is_flag=True, help="Draw the two pictures as PNG files.")
def scale_command(
    largest: str,
    most_tensors: int,
    holes: bool,
    dtype: str,
    rounds: int,
    workers: int | None,
    peers: str,
    plot: bool,
) -> None:
    """Time and memory against the model's size, and against the number of tensors."""
    from bench import scale

    # The tiny one is for trying this out; it would only spoil the fit.
    models = MODELS[:1] if largest == MODELS[0] else MODELS[1 : MODELS.index(largest) + 1]
    out = _results("scale")
    measured = scale.scale(
        models,
        [count for count in (10**n for n in range(2, 8)) if count <= most_tensors],
        _peers(peers, ()),
        dtype=_dtype(dtype),
        workers=workers or machine.usable_cpus(),
        rounds=rounds,
        holes=holes,
        tell=_tell,
    )
    lines = write_lines(measured, out)
    click.echo(scale.report(lines))
    click.echo(f"Raw figures: {out}")
    for kind, across in (("size", "bytes of the file"), ("tensors", "tensors")) if plot else ():
        picture = f"{os.path.splitext(out)[0]}-{kind}.png"
        with open(picture, "wb") as file:
            file.write(_plots().scale(scale.series(lines, kind), across))
        click.echo(f"Picture: {picture}")


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _peers(names: str, folders: tuple[str, ...]) -> list[Peer]:
    try:
        return find_peers([n for n in names.split(",") if n], folders=folders)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="--peers") from error


def _plots() -> ModuleType:
    try:
        from bench import plots
    except ImportError as error:  # matplotlib is an extra
        raise click.ClickException("pictures need: pip install 'streamload[plot]'") from error
    return plots


if __name__ == "__main__":
    main(prog_name="python -m bench")
