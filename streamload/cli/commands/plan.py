"""``streamload plan PATH``: everything a load would find out, before a byte of data moves."""

from __future__ import annotations

import json
from typing import Any

import click

from streamload.cli.errors import as_options
from streamload.cli.options import common_options, given, load_options
from streamload.cli.render.advice import slow_notes, smaller_ways
from streamload.cli.render.ledger import ledger_lines
from streamload.cli.render.tables import heading, say
from streamload.core.errors import PlanError, printable
from streamload.core.report import LoadReport, format_bytes


@click.command("plan", epilog="Example: streamload plan ./gpt2-xl --dtype bfloat16")
@click.argument("path")
@load_options
@common_options
def command(path: str, as_json: bool, **options: Any) -> None:
    """Say what loading the checkpoint at PATH would do and need, without doing it.

    Exits with 1 if the load would be refused, and with 3 if it would not fit in memory.
    """
    from streamload.loading.calls import plan_checkpoint

    try:
        report = plan_checkpoint(path, **given(options)).report
    except PlanError as error:
        if error.report is None:
            raise
        report = error.report
    memory = report.memory
    fits = memory.needed_bytes <= memory.available_bytes or options["check_memory"] is False
    if as_json:
        say(json.dumps({**report.to_dict(), "ok": report.ok and fits}))
    else:
        say(as_options("\n".join(_as_text(path, report, fits=fits))))
    if not report.ok:
        raise SystemExit(1)
    if not fits:
        raise SystemExit(3)


def _as_text(path: str, report: LoadReport, *, fits: bool) -> list[str]:
    memory = report.memory
    limit = {"cgroup": "cgroup limit", "device": "on the device"}.get(memory.limit, memory.limit)
    lines = [heading(printable(path)), report.summary()]
    lines.append(
        f"needs {format_bytes(memory.needed_bytes)}, "
        f"{format_bytes(memory.available_bytes)} available ({limit})"
    )
    if not fits:
        lines += ["does not fit", *(f"would fit: {way}" for way in smaller_ways(report))]
    lines += ["", *ledger_lines(report.loaded), ""]
    for title in ("missing", "unexpected", "unfilled"):
        lines += _list(title, getattr(report, title))
    lines += _list("shape mismatch", tuple(map(str, report.shape_mismatch)))
    told = {*report.missing, *report.unexpected, *report.unfilled}
    lines += _list("problems", tuple(p for p in report.problems if p not in told))
    if report.ignored:
        lines.append(f"ignored: {len(report.ignored)} stored tensors the model does not load")
    lines += [f"tied: {' = '.join(group)}" for group in report.tied]
    lines += [f"notice: {note}" for note in report.notices]
    lines += [f"slow: {note}" for note in slow_notes(path, report)]
    lines.append("this load would be done" if report.ok and fits else "this load would be refused")
    return lines


def _list(title: str, names: tuple[str, ...]) -> list[str]:
    return (
        [f"{title} ({len(names)}):", *(f"  {printable(name)}" for name in names)] if names else []
    )
