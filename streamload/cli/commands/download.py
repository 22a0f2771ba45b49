"""``streamload download WHAT [DIR]``."""

from __future__ import annotations

from typing import Any

import click

from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say_report
from streamload.cli.shared_options import common_options, given
from streamload.cli.types import INDICES


@click.command("download", epilog="Example: streamload download hf:openai-community/gpt2 ./gpt2")
@click.argument("what")
@click.argument("folder", required=False, metavar="[DIR]")
@click.option(
    "--base-url", help="neox-20b: the address of its files. [default: $STREAMLOAD_NEOX_URL]"
)
@click.option("--layers", type=INDICES, help="neox-20b: only these blocks, like 0,1,5-7.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    help="neox-20b: give up after so many tries in a row without new data. [default: 5]",
)
@common_options
def command(what: str, folder: str | None, as_json: bool, **options: Any) -> None:
    """Fetch a checkpoint into DIR; files that are there already are not fetched again.

    \b
    WHAT is one of:
      hf:ORG/NAME[@REVISION]  from the Hugging Face hub; without DIR into its cache, from
                              where the same name loads it
      neox-20b                GPT-NeoX-20B's raw partitions, from --base-url; without DIR
                              into data/neox_fast if that exists, else data/neox
    """  # noqa: D301 - click wants the backspace itself
    from streamload.downloading import download

    with progress_bar("fetching") as progress:
        report = download(what, folder, progress=progress, **given(options))
    say_report(as_json, report.to_dict, report.to_text)
