"""``streamload convert SRC DST``."""

from __future__ import annotations

import json

import click

from streamload.cli.options import common_options
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say
from streamload.cli.types import BYTES, DTYPE
from streamload.core.errors import printable


@click.command(
    "convert",
    epilog="Example: streamload convert ./gpt2-xl ./gpt2-xl-bf16 --dtype bfloat16 --names local",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--dtype", type=DTYPE, help="Cast floating-point tensors: bfloat16, float16, ...")
@click.option(
    "--names",
    type=click.Choice(("published", "local")),
    default="published",
    show_default=True,
    help="local: ready for --mode map, without a transposition left to do.",
)
@click.option("--max-shard-bytes", type=BYTES, help="Cut into files of at most this size.")
@common_options
def command(
    source: str,
    destination: str,
    dtype: str | None,
    names: str,
    max_shard_bytes: int | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC anew as safetensors to DST, in bounded memory.

    DST is one file if it ends in .safetensors, else a folder that also gets config.json and the
    tokenizer. What was there stays whole until the new files are.
    """
    import streamload

    if max_shard_bytes is not None and destination.lower().endswith(".safetensors"):
        raise click.UsageError("--max-shard-bytes needs a folder, not one file")
    with progress_bar("converting") as progress:
        report = streamload.convert(
            source,
            destination,
            names=names,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
    text = f"{printable(destination)}: {report.to_text()}"
    say(json.dumps(report.to_dict()) if as_json else text)
