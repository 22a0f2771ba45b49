"""``streamload convert SRC DST``."""

from __future__ import annotations

from typing import Any

import click

from streamload.cli.model_choice import hush_imports
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say_report
from streamload.cli.shared_options import (
    adapter_option,
    common_options,
    dtype_option,
    given,
    max_shard_bytes_option,
    prefix_option,
    reach_options,
)
from streamload.core.wording import printable


@click.command(
    "convert",
    epilog="Example: streamload convert ./gpt2-xl ./gpt2-xl-bf16 --dtype bfloat16 --names local",
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@dtype_option
@click.option(
    "--names",
    type=click.Choice(("published", "local")),
    default="published",
    show_default=True,
    help="local: streamload's own names and layout, which --mode map takes as they are.",
)
@max_shard_bytes_option
@prefix_option
@adapter_option
@reach_options
@common_options
def command(source: str, destination: str, as_json: bool, **options: Any) -> None:
    """Rewrite the checkpoint SRC as safetensors at DST, in bounded memory.

    DST is one file if it ends in .safetensors, else a folder that also gets config.json and the
    tokenizer. Old files there stay until the new ones are complete, and are then gone: also SRC,
    if DST is the same.
    """
    import streamload

    chosen = given(options)
    if "max_shard_bytes" in chosen and destination.lower().endswith(".safetensors"):
        raise click.UsageError("--max-shard-bytes needs a folder, not one file")
    hush_imports()
    with progress_bar("converting") as progress:
        report = streamload.convert(source, destination, progress=progress, **chosen)
    say_report(as_json, report.to_dict, lambda: f"{printable(destination)}: {report.to_text()}")
