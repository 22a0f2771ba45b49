"""``streamload plan PATH``: everything a load would find out, before a byte of data moves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.failures import as_options
from streamload.cli.model_choice import plan_model, plan_over_ranks, transformers_option
from streamload.cli.render.advice import slow_notes
from streamload.cli.render.ledger import ledger_lines
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.ranks import rank_lines, refuse_half
from streamload.cli.render.tables import heading, say_result
from streamload.cli.shared_options import common_options, given, load_options, shard_option
from streamload.core.wording import format_bytes, plural, printable, section, without_secrets

if TYPE_CHECKING:
    from streamload.loading.sharding import RankPlan
    from streamload.planning.records import Plan


@click.command("plan", epilog="Example: streamload plan ./gpt2-xl --dtype bfloat16")
@click.argument("path")
@shard_option(ranks=True)
@transformers_option
@load_options
@common_options
def command(
    path: str,
    shard: str | None,
    ranks: int | None,
    by_transformers: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what loading the checkpoint at PATH would do and need, without doing it.

    Exits with 1 if the load would be refused, and with 3 if it would not fit in memory. With
    --shard and --ranks it says what each of so many ranks would read.
    """
    refuse_half(shard, ranks)
    each: tuple[RankPlan, ...] = ()
    with progress_bar("planning"):  # nothing moves, but torch takes seconds to import
        if shard is not None and ranks is not None:
            theirs = {"by_transformers": by_transformers}
            plan, each = plan_over_ranks(path, shard, ranks, **theirs, **given(options))
        else:
            plan = plan_model(path, by_transformers=by_transformers, **given(options))
        from streamload.loading.budget import ways_out
    report, memory = plan.report, plan.report.memory
    fits = memory.needed_bytes <= memory.available_bytes or options["check_memory"] is False
    ways = [] if fits else ["does not fit", *(f"would fit: {way}" for way in ways_out(plan))]
    say_result(
        as_json,
        lambda: {**report.to_dict(), "ok": report.ok and fits, "ranks": list(map(asdict, each))},
        lambda: as_options("\n".join([*_as_text(path, plan, ways), *rank_lines(each)])),
    )
    if not report.ok:
        raise SystemExit(1)
    if not fits:
        raise SystemExit(3)


def _as_text(path: str, plan: Plan, ways: list[str]) -> list[str]:
    report, memory = plan.report, plan.memory
    limit = {"cgroup": "cgroup limit", "device": "on the device"}.get(memory.limit, memory.limit)
    lines = [heading(printable(without_secrets(path))), report.summary()]
    room = (
        f"needs {format_bytes(memory.needed_bytes)}, "
        f"{format_bytes(memory.available_bytes)} available ({limit})"
    )
    mapped_bytes = sum(tensor.nbytes for tensor in plan.tensors if tensor.mapped is not None)
    # Without this, a model of gigabytes that needs 0 B looks like a mistake.
    mapped = f"; {format_bytes(mapped_bytes)} are mapped from the file" if mapped_bytes else ""
    lines.append(f"{room}{mapped}")
    lines += [*ways, "", *ledger_lines(report.loaded), ""]
    lines += section("problems", [printable(problem) for problem in report.problems])
    lines += report.finding_lines()
    lines += [f"slow: {note}" for note in slow_notes(path, report)]
    if report.ok and not ways:
        lines.append("this load would go ahead")
    else:  # what is wrong stands above a table that may be longer than the terminal
        why = [room] * bool(ways)
        why += [plural(len(report.problems), "problem")] * (not report.ok)
        lines.append(f"this load would be refused: {'; '.join(why)}")
    return lines
