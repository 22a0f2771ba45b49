"""``streamload inspect PATH [TENSOR]``: what the headers say; imports neither torch nor numpy."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.render.listing import as_dict, as_text
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say_result
from streamload.cli.shared_options import common_options, reach_options
from streamload.core.errors import MissingExtraError, StreamloadError
from streamload.sources.wrapping.decoded_source import codes_notice, quantised_lines

if TYPE_CHECKING:
    from streamload.sources.base import Source


@click.command("inspect", epilog="Example: streamload inspect ./gpt2-xl h.0.attn.c_attn.weight")
@click.argument("path")
@click.argument("tensor", required=False)
@click.option("show_all", "--all", is_flag=True, help="List every tensor on a line of its own.")
@reach_options
@common_options
def command(path: str, tensor: str | None, show_all: bool, as_json: bool, **reach: Any) -> None:
    """List the tensors of the checkpoint at PATH from its headers, without reading data.

    With TENSOR: that tensor's statistics and a few of its values.
    """
    from streamload.sources.detect import open_checkpoint

    with open_checkpoint(path, **reach) as source:
        if tensor is not None:
            with progress_bar("reading"):
                from streamload.cli.render.statistics import describe, show

                facts = describe(source, tensor)
            with suppress(StreamloadError):  # a damaged configuration says nothing of codes
                notice = codes_notice(source, tensor)
                facts["notices"] = [notice] if notice else []
            say_result(as_json, lambda: facts, lambda: show(facts))
            return
        # A damaged configuration is a failure, if one that leaves the list of tensors whole.
        if as_json:
            _check_config(source)
        say_result(
            as_json,
            lambda: as_dict(source, _quantised(source)),
            lambda: as_text(source, show_all=show_all, notices=_quantised(source)),
        )
        if not as_json:
            _check_config(source)


def _quantised(source: Source) -> tuple[str, ...]:
    """What the configuration says of quantised weights, and whether they can be decoded."""
    with suppress(StreamloadError):  # a damaged configuration is told after the list
        return quantised_lines(source)
    return ()


def _check_config(source: Source) -> None:
    with suppress(MissingExtraError):
        source.config()
