"""``streamload synth NAME DIR``."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import click

from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say_report
from streamload.cli.shared_options import common_options, given, max_shard_bytes_option
from streamload.cli.types import dtype_among, one_of
from streamload.core.wording import format_bytes, printable
from streamload.synthesis.presets import PRESETS

_RAW = "neox-20b-raw"
_FAMILIES = groupby(PRESETS, lambda name: PRESETS[name].config["model_type"])
_HELP = """\
Write a checkpoint of random weights in the exact layout published under NAME.

Nothing is downloaded. The same options give the same bytes.

\b
NAME is one of:
""" + "\n".join(f"  {' '.join(names)}" for names in (*(list(n) for _, n in _FAMILIES), [_RAW]))
_DTYPE = dtype_among(("float32", "float16", "bfloat16"))
_COMMON = ("seed", "layers", "force")
_ONLY_RAW = ("partitions", "hidden", "vocab_size", "sparse")


@click.command("synth", help=_HELP, epilog="Example: streamload synth gpt2-xl ./gpt2-xl")
@click.argument("name", type=one_of((*PRESETS, _RAW)), metavar="NAME")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the random numbers. [default: 0]")
@click.option("--layers", type=click.IntRange(min=1), help="Number of blocks. [default: all]")
@click.option("--force", is_flag=True, default=None, help="Overwrite a different checkpoint.")
@click.option("--dtype", type=_DTYPE, help="float32, float16, bfloat16. [default: as published]")
@click.option("--masks/--no-masks", default=None, help="Write the causal masks too. [default: yes]")
@click.option("--tokenizer/--no-tokenizer", default=None, help="Write a tokenizer. [default: yes]")
@max_shard_bytes_option
@click.option("--partitions", type=click.IntRange(min=1), help=f"{_RAW}: ranks. [default: 2]")
@click.option("--hidden", type=click.IntRange(min=16), help=f"{_RAW}: width. [default: 6144]")
@click.option(
    "--vocab-size", type=click.IntRange(min=256), help=f"{_RAW}: tokens, padding included."
)
@click.option(
    "--sparse",
    is_flag=True,
    default=None,
    help=f"{_RAW}: files of full size that take no space on disk.",
)
@common_options
def command(name: str, directory: str, as_json: bool, **options: Any) -> None:
    from streamload.synthesis import synthesize, synthesize_neox_raw

    chosen = given(options)
    foreign = [
        option
        for option in chosen
        if option not in _COMMON and (option in _ONLY_RAW) is not (name == _RAW)
    ]
    if foreign:
        spelled = ", ".join("--" + option.replace("_", "-") for option in foreign)
        raise click.UsageError(f"{spelled} cannot be used with {name}")
    with progress_bar(f"writing {name}") as progress:
        if name == _RAW:
            report = synthesize_neox_raw(directory, progress=progress, **chosen)
        else:
            report = synthesize(name, directory, progress=progress, **chosen)
    size, seconds = format_bytes(report.bytes_written), report.elapsed_s
    what = f"{report.tensors} tensors, {size} written in {seconds:.1f} s"
    if report.reused:
        what = f"this {name} is there already"
    lines = [f"{printable(directory)}: {what}", *(f"notice: {n}" for n in report.notices)]
    say_report(as_json, report.to_dict, lambda: "\n".join(lines))
