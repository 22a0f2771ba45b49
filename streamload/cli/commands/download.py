"""``streamload download WHAT [DIR]``."""

from __future__ import annotations

import json
from typing import Any

import click

from streamload.cli.options import common_options, given
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say
from streamload.cli.types import INDICES


@click.command("download", epilog="Example: streamload download hf:openai-community/gpt2 ./gpt2")
@click.argument("what")
@click.argument("folder", required=False, metavar="[DIR]")
@click.option("--base-url", help="neox-20b: where its files are. [default: $STREAMLOAD_NEOX_URL]")
@click.option("--layers", type=INDICES, help="neox-20b: only these blocks, like 0,1,5-7.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    help="neox-20b: tries in a row that bring nothing. [default: 5]",
)
@common_options
def command(what: str, folder: str | None, as_json: bool, **options: Any) -> None:
    """Fetch a checkpoint into DIR; what is there already is not fetched again.

    \b
    WHAT is one of:
      hf:ORG/NAME[@REVISION]  from the Hugging Face hub; without DIR into its cache, where
                              the same name loads
      neox-20b                GPT-NeoX-20B's raw partitions, from --base-url; without DIR
                              into data/neox_fast if that exists, else data/neox
    """  # noqa: D301 - click wants the backspace itself
    from streamload.downloading import download

    with progress_bar("fetching") as progress:
        report = download(what, folder, progress=progress, **given(options))
    say(json.dumps(report.to_dict()) if as_json else report.to_text())
