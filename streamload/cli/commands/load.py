"""``streamload load PATH``."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from streamload.cli.model_choice import load_model, load_over_ranks, transformers_option
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.reporting import report_text
from streamload.cli.render.tables import say_report
from streamload.cli.render.terminal import note
from streamload.cli.render.trace import TRACE_PATH, Trace
from streamload.cli.shared_options import common_options, given, load_options, shard_option
from streamload.core.wording import printable
from streamload.measuring.own_peers import import_for_loads


@click.command("load", epilog="Example: streamload load ./gpt2-xl --dtype bfloat16 -v")
@click.argument("path")
@click.option("-v", "--verbose", is_flag=True, help="List every assignment.")
@click.option(
    "--trace",
    "trace_path",
    type=TRACE_PATH,
    metavar="FILE.png|FILE.json",
    help="Write memory and bytes read over time; a picture needs the extra plot.",
)
@shard_option()
@transformers_option
@load_options
@common_options
def command(
    path: str,
    verbose: bool,
    trace_path: str | None,
    shard: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Load the checkpoint at PATH into its model, and print the report.

    Shows how fast a load is and how much memory it takes; the model is gone afterwards.

    PATH is a file or a folder of safetensors, .pt or .bin files, GGUF,
    torch.distributed.checkpoint, Meta's consolidated parts or raw GPT-NeoX; what is quantised is
    decoded.

    With --shard, torchrun starts the ranks: python -m torch.distributed.run --nproc-per-node 2 -m
    streamload load PATH --shard fsdp
    """
    trace = None
    if trace_path is not None:
        import_for_loads()  # or the curves would include the memory that torch takes
        trace = Trace()
    with progress_bar("loading") as progress, trace or contextlib.nullcontext():
        if trace is not None:
            progress = trace.progress(progress)
        # Held until the trace has ended, which would otherwise show the model being freed.
        rank = 0
        if shard is None:
            loaded = load_model(path, progress=progress, **given(options))
        else:
            loaded, rank = load_over_ranks(path, shard, progress=progress, **given(options))
    if rank:
        return  # the first rank's report has every rank's share
    report = loaded.report
    if trace is not None and trace_path is not None:
        trace.write(trace_path, report)
        note(f"trace written to {printable(trace_path)}")
    say_report(as_json, report.to_dict, lambda: report_text(report, verbose=verbose))
