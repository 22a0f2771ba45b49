"""``streamload load PATH``."""

from __future__ import annotations

import json
from typing import Any

import click

from streamload.cli.options import common_options, given, load_options
from streamload.cli.progress import progress_bar
from streamload.cli.tables import say


@click.command("load", epilog="Example: streamload load ./gpt2-xl --dtype bfloat16 -v")
@click.argument("path")
@click.option("-v", "--verbose", is_flag=True, help="List every assignment.")
@load_options
@common_options
def command(path: str, verbose: bool, as_json: bool, **options: Any) -> None:
    """Load the checkpoint at PATH into its model, and print the report.

    Shows how fast a load is and how much memory it takes; the model is gone afterwards.
    """
    import streamload

    with progress_bar("loading") as progress:
        report = streamload.load(path, progress=progress, **given(options)).report
    if as_json:
        say(json.dumps(report.to_dict()))
    else:
        say(report.to_text(verbose=verbose))
