"""``python -m bench compare | generate | scale | device | report | peers``."""

import json
import os
import time
from typing import Any

import click

from bench import checkpoints, options
from bench.compare import compare
from bench.report import showing
from bench.report.figures import read_lines
from streamload.cli.render.tables import columns, say

MODELS = ("gpt2-tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_SETTINGS)
def main() -> None:
    """Measures loaders of checkpoints on this machine.

    \b
    A first try, in a minute:   python -m bench compare --model gpt2-tiny --rounds 1
    Figures worth telling:      python -m bench compare --model gpt2 --plot --html page.html

    Loaders that are not installed cost their own row only; pip install 'streamload[bench]' brings
    them all. Checkpoints and results go to $BENCH_DIR, or to bench-results/.
    """


@main.command("compare", short_help="Loaders on one checkpoint: time, memory, values.")
@options.MODEL
@options.PATH
@options.DTYPE
@options.WORKERS
@options.ROUNDS
@options.COLD
@options.LIMIT_MB
@options.PEERS
@options.PEERS_DIR
@options.TIMEOUT_S
@options.PLOT
@options.THEME
@options.HTML
def compare_command(
    model: str,
    path: str | None,
    dtype: str,
    limit_mb: int | None,
    peers: str,
    peers_dir: tuple[str, ...],
    plot: bool,
    theme: str,
    html: str | None,
    **settings: Any,
) -> None:
    """Every loader on one checkpoint, with the floor of this machine beside them.

    Each measurement is a process of its own. What counts is the load and the first use of every
    value; memory is watched from outside; the values are compared with the file afterwards.
    """
    chosen = options.chosen_peers(peers, peers_dir)
    if plot or html:
        showing.check_drawing()
    measured = compare(
        options.checkpoint(model, path),
        chosen,
        dtype=options.torch_name(dtype),
        limit_bytes=limit_mb << 20 if limit_mb else None,
        tell=showing.tell,
        **settings,
    )
    lines, stem = showing.run("compare", measured)
    if plot:
        showing.pictures(lines, stem, theme)
    if html:
        showing.page(lines, html)
    showing.fail_without_success(lines)


@main.command("generate", short_help="From the start of the process to the first token.")
@options.MODEL
@options.PATH
@click.option(
    "--dtype", "dtypes", type=options.DTYPES, multiple=True, default=("float32", "bfloat16"),
    show_default=True, help="Several times for several.",
)  # fmt: skip
@click.option(
    "--tokens", "count", type=click.IntRange(2), default=16, show_default=True,
    help="How many are generated.",
)  # fmt: skip
@options.ROUNDS
@options.WORKERS
@options.COLD
@options.LIMIT_MB
@options.PEERS
@click.option(
    "--timeout-s", type=float, default=1200, show_default=True, help="Ends a loader that hangs."
)
def generate_command(
    model: str,
    path: str | None,
    dtypes: tuple[str, ...],
    limit_mb: int | None,
    peers: str,
    **settings: Any,
) -> None:
    """From the start of the process to the first token, and to the last.

    With --limit-mb below the model's size: what a token costs that the disk has to bring.
    """
    from bench import generate

    chosen = options.chosen_peers(peers, (), kind="generators")
    path = options.checkpoint(model, path)
    measured = generate.generate(
        path,
        [options.torch_name(name) for name in dtypes],
        chosen,
        vocabulary=options.vocabulary(path),
        limit_bytes=limit_mb << 20 if limit_mb else None,
        tell=showing.tell,
        **settings,
    )
    showing.run("generate", measured)


@main.command("scale", short_help="Growth with the model's size and the number of tensors.")
@click.option(
    "--largest", type=click.Choice(MODELS), default="gpt2-xl", show_default=True,
    help="Models up to this one (all up to gpt2-xl take 12 GB of disk).",
)  # fmt: skip
@click.option(
    "--most-tensors", type=click.IntRange(100), default=100_000, show_default=True,
    help="In one file of small tensors.",
)  # fmt: skip
@click.option(
    "--holes/--no-holes", default=True, show_default=True,
    help="Plan and map 20 billion parameters (a file of holes: no disk).",
)  # fmt: skip
@options.DTYPE
@options.ROUNDS
@options.WORKERS
@click.option(
    "--peers", default="floor_cast,streamload_stream,streamload_stored,transformers",
    help="Names, with commas between [default: the floor, two of streamload's, transformers].",
)  # fmt: skip
@options.PLOT
@options.THEME
def scale_command(
    largest: str,
    most_tensors: int,
    dtype: str,
    peers: str,
    plot: bool,
    theme: str,
    **settings: Any,
) -> None:
    """Time and memory against the model's size, and against the number of tensors."""
    from bench import scale

    if plot:
        showing.check_drawing()
    # The tiny one is for trying this out; it would only spoil the fit.
    models = MODELS[:1] if largest == MODELS[0] else MODELS[1 : MODELS.index(largest) + 1]
    counts = [count for count in (10**n for n in range(2, 8)) if count <= most_tensors]
    measured = scale.scale(
        models,
        counts,
        options.chosen_peers(peers, ()),
        dtype=options.torch_name(dtype),
        tell=showing.tell,
        **settings,
    )
    lines, stem = showing.run("scale", measured)
    if plot:
        showing.pictures(lines, stem, theme)


@main.command("report", short_help="The table, pictures and page of figures taken earlier.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@options.PLOT
@options.THEME
@click.option("--to", "stem", help="Pictures are named STEM-….png [default: as the first file].")
@options.HTML
def report_command(
    files: tuple[str, ...], plot: bool, theme: str, stem: str | None, html: str | None
) -> None:
    """The table, pictures and page of raw figures (.jsonl) that were taken earlier.

    Several FILES are put together if they are of the same checkpoint, options and machine: loaders
    can be measured one by one.
    """
    try:
        lines = read_lines(files)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    showing.table(lines)
    if plot:
        showing.pictures(lines, stem or os.path.splitext(files[0])[0], theme)
    if html:
        showing.page(lines, html)


@main.command("peers", short_help="Which loaders there are, and whether they are installed.")
@options.PEERS_DIR
def peers_command(peers_dir: tuple[str, ...]) -> None:
    """Which loaders there are, what they deliver, and whether they can run here."""
    rows = [["name", "in tables", "here"]]
    rows += [[p.name, p.label, p.available() or "yes"] for p in options.chosen_peers("", peers_dir)]
    say("\n".join(columns(rows)))


@main.command("device", short_help="Rates, values and failures of a CUDA device.")
@click.option("--only", multiple=True, help="A check by name; several times for several.")
@click.option(
    "--gib", type=click.FloatRange(min=0.1), default=4, show_default=True, help="Size of the file."
)
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=10, show_default=True,
    help="After which no check is begun.",
)  # fmt: skip
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
    lines = list(running.run_all(sizes, only=only, total_s=60 * minutes, tell=showing.tell))
    path = path or os.path.join(
        checkpoints.results_dir(), f"device-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(lines, file, indent=1)
    say(f"{running.report(lines)}\nRaw figures: {path}")
    if any(row["ok"] is False for line in lines for row in line["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="python -m bench")
