"""From exceptions to one line on stderr and an exit code: the only place that knows both.

0 done · 1 refused or failed · 2 wrong usage (click's own) · 3 not enough memory · 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import click

from streamload.cli.render.tables import say
from streamload.core.errors import MemoryBudgetError, PlanError, StreamloadError
from streamload.core.habits import answer_to
from streamload.core.wording import printable

_MOST_LINES = 4
_CLICKS_OWN = (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit)
# Keyword arguments as the library's messages spell them; not inside a path or a quoted name.
_ARGUMENT = re.compile(
    r"(?<![\w/.=\-'\"])(dtype|mode|layout|device|ties|overflow|replicas|quantize|prefix|workers|"
    r"layers|base_url|chunk_bytes|ring_bytes|max_shard_bytes|top_k|force|cache|check_memory|strict|"
    r"timeout_s|download)="
    r"(True(?: \(--force\))?|False|'[^']*'|[\w.:]*)"
)
_CALLED = re.compile(r"called (\w+) here")


def exit_code(error: BaseException) -> int | None:
    """The process' exit code for an exception; None for a fault of streamload itself."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, (MemoryBudgetError, MemoryError)):
        return 3
    # ValueError: an option's value that only the library can judge.
    if isinstance(error, (StreamloadError, OSError, ValueError)):
        return 1
    return None


def as_options(text: str) -> str:
    """Keyword arguments in a message as the command line spells them: ``--dtype bfloat16``."""
    return _ARGUMENT.sub(_as_option, text)


def _as_option(match: re.Match[str]) -> str:
    name, value = match[1].replace("_", "-"), match[2].strip("'")
    if value == "False":
        return f"--no-{name}"
    return f"--{name}" if not value or value.startswith("True") else f"--{name} {value}"


def one_line(error: BaseException) -> str:
    """The message on one line, cut after the first few problems."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    # What a terminal cannot show is escaped.
    shown = (" ".join(printable(line).split()) for line in str(error).split("\n"))
    lines = [line.rstrip(";") for line in shown if line] or [type(error).__name__]
    if isinstance(error, MemoryError):
        lines.insert(0, "out of memory:")
    more = len(lines) - _MOST_LINES
    if more > 0:
        lines[_MOST_LINES:] = [f"… and {more} more (--json or `streamload plan` lists all)"]
    text = lines[0]
    for line in lines[1:]:
        text += f" {line}" if text.endswith(":") else f"; {line}"
    return as_options(text)


def failure_as_dict(error: BaseException) -> dict[str, Any]:
    """What ``--json`` prints on a failure: the report, if there is one, and the error."""
    report = error.report if isinstance(error, PlanError) else None
    facts: dict[str, Any] = {} if report is None else report.to_dict()
    facts |= {"ok": False, "error": one_line(error)}
    if isinstance(error, MemoryBudgetError):
        names = ("needed_bytes", "available_bytes", "limit")
        facts["memory"] = {name: getattr(error, name) for name in names}
    elif report is None:
        facts["problems"] = list(getattr(error, "problems", (str(error),)))
    return facts


def note_flag(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """A click callback that notes a flag for ``failures_as_one_line``."""
    if value:
        ctx.meta[f"streamload.{param.name}"] = True
    return value


traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=note_flag,
    help="Show the traceback of a failure.",
)
quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=note_flag,
    help="No progress, notes and reports: only what was asked for, and errors.",
)


@contextlib.contextmanager
def failures_as_one_line(meta: Mapping[str, Any]) -> Iterator[None]:
    """Turn what the block raises into a line on stderr and ``SystemExit``.

    Errors of unknown kinds are faults of streamload itself and keep their traceback.

    Args:
        meta: click's notes, with the flags ``streamload.as_json`` and ``streamload.traceback``.
    """
    try:
        yield
    except _CLICKS_OWN as error:
        if isinstance(error, click.NoSuchOption):
            _answer(error)
        if isinstance(error, click.ClickException) and error.message:
            vars(error)["message"] = printable(error.message)
        raise
    except BrokenPipeError:
        _leave_stdout_alone()
        raise SystemExit(1) from None
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        if meta.get("streamload.traceback"):
            say(traceback.format_exc(), err=True, end="", raw=True)
        if meta.get("streamload.as_json"):
            say(json.dumps(failure_as_dict(error)), raw=True)
        say(f"streamload: error: {one_line(error)}", err=True)
        raise SystemExit(code) from None


def _answer(error: click.NoSuchOption) -> None:
    """Say what an option of other programs is called here."""
    answer = as_options(answer_to(error.option_name))
    if answer:
        answer = _CALLED.sub(lambda m: f"called --{m[1].replace('_', '-')} here", answer)
        vars(error)["message"] = f"No such option: {error.option_name}{answer}"
        error.possibilities = None


def _leave_stdout_alone() -> None:
    """Whoever read stdout went away (``| head``): the flush at exit must not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
