"""``python -m bench compare | generate | scale | device``."""

import json
import os
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

import click

from bench import checkpoints
from bench.compare import compare, write_lines
from bench.job import find_peers
from bench.report import tables
from streamload.cli.render.tables import say
from streamload.core.options import usable_cpus
from streamload.measuring.peers import Peer

Line: TypeAlias = dict[str, Any]
DTYPES = click.Choice(["float32", "bfloat16", "float16", "stored"])
MODELS = ("gpt2-tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

_model = click.option("--model", default="gpt2", show_default=True, help="Made if not there.")
_path = click.option("--path", type=click.Path(exists=True), help="Your own checkpoint.")
_dtype = click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True)
_workers = click.option(
    "--workers", type=click.IntRange(1), default=usable_cpus, help="Threads [default: all CPUs]."
)
_rounds = click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
_cold = click.option("--cold", is_flag=True, help="Drop the files from the page cache before each.")


@click.group()
def main() -> None:
    """Measures loaders of checkpoints on this machine.

    Checkpoints and results go to $BENCH_DIR, or to bench-results/.
    """


@main.command("compare")
@_model
@_path
@_dtype
@_workers
@_rounds
@_cold
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
    limit_mb: int | None,
    peers: str,
    peers_dir: tuple[str, ...],
    plot: bool,
    html: str | None,
    **options: Any,
) -> None:
    """Every loader on one checkpoint, with the floor of this machine beside them."""
    measured = compare(
        _checkpoint(model, path),
        _peers(peers, peers_dir),
        dtype=_torch_name(dtype),
        limit_bytes=limit_mb << 20 if limit_mb else None,
        tell=_tell,
        **options,
    )
    lines, stem = _run("compare", measured, tables.report)
    if plot:
        for picture in _plots().save_all(lines, stem):
            say(f"Picture: {picture}")
    if html:
        _plots()
        from bench.report import page

        page.write(lines, html)
        say(f"Page: {html}")


@main.command("generate")
@_model
@_path
@click.option(
    "--dtype", "dtypes", type=DTYPES, multiple=True, default=("float32", "bfloat16"),
    show_default=True,
)  # fmt: skip
@click.option("--tokens", "count", type=click.IntRange(2), default=16, show_default=True)
@_rounds
@_workers
@_cold
@click.option("--limit-mb", type=click.IntRange(1), help="Memory of each process, MiB.")
@click.option("--peers", default="", help="Names, with commas between [default: all].")
@click.option("--timeout-s", type=float, default=1200, show_default=True)
def generate_command(
    model: str,
    path: str | None,
    dtypes: tuple[str, ...],
    limit_mb: int | None,
    peers: str,
    **options: Any,
) -> None:
    """From the start of the process to the first token, and to the last.

    With --limit-mb below the model's size: what a token costs that the disk has to bring.
    """
    from bench import generate

    path = _checkpoint(model, path)
    measured = generate.generate(
        path,
        [_torch_name(name) for name in dtypes],
        _peers(peers, (), kind="generators"),
        vocabulary=checkpoints.vocabulary_of(path),
        limit_bytes=limit_mb << 20 if limit_mb else None,
        tell=_tell,
        **options,
    )
    _run("generate", measured, generate.report)


@main.command("scale")
@click.option("--largest", type=click.Choice(MODELS), default="gpt2-xl", show_default=True)
@click.option("--most-tensors", type=click.IntRange(100), default=100_000, show_default=True)
@click.option("--holes/--no-holes", default=True, help="Plan and map 20 billion parameters.")
@_dtype
@_rounds
@_workers
@click.option(
    "--peers",
    default="floor_cast,streamload_stream,streamload_stored,transformers",
    show_default=True,
    help="Names, with commas between.",
)
@click.option("--plot", is_flag=True, help="Draw the two pictures as PNG files.")
def scale_command(
    largest: str, most_tensors: int, dtype: str, peers: str, plot: bool, **options: Any
) -> None:
    """Time and memory against the model's size, and against the number of tensors."""
    from bench import scale

    # The tiny one is for trying this out; it would only spoil the fit.
    models = MODELS[:1] if largest == MODELS[0] else MODELS[1 : MODELS.index(largest) + 1]
    counts = [count for count in (10**n for n in range(2, 8)) if count <= most_tensors]
    measured = scale.scale(
        models, counts, _peers(peers, ()), dtype=_torch_name(dtype), tell=_tell, **options
    )
    lines, stem = _run("scale", measured, scale.report)
    for kind, across in (("size", "bytes of the file"), ("tensors", "tensors")) if plot else ():
        picture = f"{stem}-{kind}.png"
        with open(picture, "wb") as file:
            file.write(_plots().scale(scale.series(lines, kind), across))
        say(f"Picture: {picture}")


@main.command("device")
@click.option("--only", multiple=True, help="A check by name; several times for several.")
@click.option(
    "--gib", type=click.FloatRange(min=0.1), default=4, show_default=True, help="Of file."
)
@click.option("--minutes", type=click.FloatRange(min=0.1), default=10, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where figures are written.")
def device_command(only: tuple[str, ...], gib: float, minutes: float, path: str | None) -> None:
    """What the way to a CUDA device does: rates, values, memory, failures.

    Each check is a process of its own and is ended when its time is up.
    """
    from bench.device import running
    from bench.device.machine import Cuda
    from bench.device.rows import Sizes

    known = {check.name for check in running.CHECKS}
    if unknown := sorted(set(only) - known):
        text = f"no check {unknown[0]!r}; there are {', '.join(sorted(known))}"
        raise click.BadParameter(text, param_hint="--only")
    if why := Cuda.absent():
        raise click.ClickException(f"this needs a CUDA device: {why}")
    folder = os.path.join(checkpoints.results_dir(), "checkpoints")
    sizes = Sizes(folder, file_bytes=int(gib * 2**30) >> 26 << 26)
    lines = list(running.run_all(sizes, only=only, total_s=60 * minutes, tell=_tell))
    path = path or os.path.join(
        checkpoints.results_dir(), f"device-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(lines, file, indent=1)
    say(f"{running.report(lines)}\nRaw figures: {path}")
    if any(row["ok"] is False for line in lines for row in line["rows"]):
        raise SystemExit(1)


def _checkpoint(model: str, path: str | None) -> str:
    if path is not None:
        return path
    say(f"checkpoint: {model}", err=True)
    try:
        return checkpoints.checkpoint(model)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


def _torch_name(dtype: str) -> str | None:
    return None if dtype == "stored" else dtype


def _run(
    command: str, measured: Iterable[Line], report: Callable[[list[Line]], str]
) -> tuple[list[Line], str]:
    """Write the lines to STEM.jsonl, show the report of them, and return them and STEM."""
    name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    stem = os.path.join(checkpoints.results_dir(), name)
    lines = write_lines(measured, f"{stem}.jsonl")
    say(f"{report(lines)}\nRaw figures: {stem}.jsonl")
    return lines, stem


def _tell(text: str) -> None:
    say(text, err=True)


def _peers(names: str, folders: tuple[str, ...], *, kind: str = "peers") -> list[Peer]:
    try:
        return find_peers([n for n in names.split(",") if n], kind=kind, folders=folders)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="--peers") from error


def _plots() -> ModuleType:
    try:
        from bench.report import plots
    except ImportError as error:  # matplotlib is an extra
        raise click.ClickException("pictures need: pip install 'streamload[plot]'") from error
    return plots


if __name__ == "__main__":
    main(prog_name="python -m bench")
