"""``streamload verify PATH [--against OTHER]``."""

from __future__ import annotations

from typing import Any

import click

from streamload.cli.failures import as_options
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say_report, say_result
from streamload.cli.shared_options import (
    chunk_bytes_option,
    common_options,
    given,
    reach_options,
)
from streamload.cli.types import DTYPE


@click.command(
    "verify", epilog="Example: streamload verify ./gpt2-bf16 --against ./gpt2 --dtype bfloat16"
)
@click.argument("path")
@click.option("--against", metavar="OTHER", help="Compare with this checkpoint.")
@click.option("--dtype", type=DTYPE, help="With --against: compare after a cast to this dtype.")
@click.option("--strict", is_flag=True, help="Fail on NaN and infinite values too.")
@click.option("--workers", type=click.IntRange(min=1), help="Threads that read.")
@chunk_bytes_option
@reach_options
@common_options
def command(path: str, strict: bool, as_json: bool, **options: Any) -> None:
    """Read all of the checkpoint at PATH once, and say what is odd or damaged.

    Counts values that are not finite and tensors that are all zero, and compares content
    digests where there are any: names in a hub cache, checksums in .pt and .bin files. With
    --against, it compares all tensors instead, whatever the two checkpoints' formats and names.

    Exits with 1 for a wrong digest or a difference, and with --strict for values that are not
    finite.
    """
    chosen = given(options)
    if "dtype" in chosen and "against" not in chosen:
        raise click.UsageError("--dtype needs --against")
    with progress_bar("verifying") as progress:
        from streamload.verifying import verify

        report = verify(path, progress=progress, **chosen)
    is_good = report.ok and not (strict and report.non_finite)
    tell = say_report if is_good else say_result
    tell(as_json, report.to_dict, lambda: as_options(report.to_text()))
    if not is_good:
        raise SystemExit(1)
