"""``streamload inspect PATH [TENSOR]``: what the headers say; imports neither torch nor numpy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.render.listing import as_dict, as_text
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.ranks import rank_lines, refuse_half
from streamload.cli.render.tables import say, say_result
from streamload.cli.shared_options import common_options, given, reach_options, shard_option
from streamload.core.errors import MissingExtraError, StreamloadError
from streamload.sources.wrapping.decoded_source import codes_notice, quantised_lines

if TYPE_CHECKING:
    from streamload.loading.sharding import RankPlan
    from streamload.sources.base import Source


@click.command("inspect", epilog="Example: streamload inspect ./gpt2-xl h.0.attn.c_attn.weight")
@click.argument("path")
@click.argument("tensor", required=False)
@click.option("show_all", "--all", is_flag=True, help="List every tensor on a line of its own.")
@shard_option(ranks=True)
@reach_options
@common_options
def command(
    path: str,
    tensor: str | None,
    show_all: bool,
    shard: str | None,
    ranks: int | None,
    as_json: bool,
    **reach: Any,
) -> None:
    """List the tensors of the checkpoint at PATH from its headers, without reading data.

    With TENSOR: that tensor's statistics and a few of its values. With --shard and --ranks: also
    what each of so many ranks would read.
    """
    refuse_half(shard, ranks)
    if tensor is not None and shard is not None:
        raise click.UsageError("--shard is for a whole checkpoint, not for one tensor")
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
        each: tuple[RankPlan, ...] = ()
        if as_json:
            _check_config(source)
            each = _over_ranks(path, shard, ranks, reach)
        more = {"ranks": list(map(asdict, each))} if each else {}
        say_result(
            as_json,
            lambda: {**as_dict(source, _quantised(source)), **more},
            lambda: as_text(source, show_all=show_all, notices=_quantised(source)),
        )
        if not as_json:
            _check_config(source)
            for line in rank_lines(_over_ranks(path, shard, ranks, reach)):
                say(line)


def _over_ranks(
    path: str, shard: str | None, ranks: int | None, reach: dict[str, Any]
) -> tuple[RankPlan, ...]:
    """What each rank would read, if it is asked for.

    Raises:
        PlanError: a load would be refused.
    """
    if shard is None or ranks is None:
        return ()
    from streamload.cli.model_choice import plan_over_ranks

    plan, each = plan_over_ranks(path, shard, ranks, by_transformers=False, **given(reach))
    plan.raise_if_refused()
    return each


def _quantised(source: Source) -> tuple[str, ...]:
    """What the configuration says of quantised weights, and whether they can be decoded."""
    with suppress(StreamloadError):  # a damaged configuration is told after the list
        return quantised_lines(source)
    return ()


def _check_config(source: Source) -> None:
    with suppress(MissingExtraError):
        source.config()
