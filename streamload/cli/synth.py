"""``streamload synth NAME DIR``."""

from __future__ import annotations

import json

import click

from streamload.cli.options import common_options
from streamload.cli.progress import progress_bar
from streamload.cli.types import BYTES, DTYPE
from streamload.report import format_bytes
from streamload.synthesis.presets import PRESETS

NAMES = tuple(PRESETS)


@click.command("synth", epilog="Example: streamload synth gpt2-xl ./gpt2-xl")
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=DTYPE, help="float32, float16 or bfloat16; default: as published.")
@click.option("--layers", type=click.IntRange(min=1), help="Number of blocks, if not all.")
@click.option("--masks/--no-masks", default=True, help="Write the causal masks too.")
@click.option("--tokenizer/--no-tokenizer", default=True, help="Write a byte-level tokenizer.json.")
@click.option("--max-shard-bytes", type=BYTES, help="Cut into files of at most this size.")
@click.option("--force", is_flag=True, help="Overwrite a different checkpoint.")
@common_options
def command(
    name: str,
    directory: str,
    seed: int,
    dtype: str | None,
    layers: int | None,
    masks: bool,
    tokenizer: bool,
    max_shard_bytes: int | None,
    force: bool,
    as_json: bool,
) -> None:
    r"""Write a checkpoint of random weights in the exact layout published under NAME.

    Nothing is downloaded. The same options give the same bytes.

    \b
    NAME is one of:
      gpt2 gpt2-medium gpt2-large gpt2-xl gpt2-stub gpt2-tiny
      llama-3.2-1b llama-tiny  mistral-7b mistral-tiny
      qwen2.5-0.5b qwen2-tiny  qwen3-0.6b qwen3-tiny
      pythia-1b neox-tiny
    """
    from streamload.synthesis import synthesize

    with progress_bar(f"writing {name}") as progress:
        report = synthesize(
            name,
            directory,
            seed=seed,
            dtype=dtype,
            layers=layers,
            masks=masks,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            force=force,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    elif report.reused:
        click.echo(f"{directory}: this {name} is there already")
    else:
        size, seconds = format_bytes(report.bytes_written), report.elapsed_s
        click.echo(f"{directory}: {report.tensors} tensors, {size}, written in {seconds:.1f} s")
