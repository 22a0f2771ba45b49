"""From exceptions to one line on stderr and an exit code: the only place that knows both.

0 done · 1 refused or failed · 2 wrong usage (click's own) · 3 not enough memory · 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback as traceback_module
from collections.abc import Iterator

import click

from streamload.errors import MemoryBudgetError, StreamloadError, printable

__all__ = ["exit_code", "failures_as_one_line", "one_line"]

_MAX_PARTS = 4


def exit_code(error: BaseException) -> int | None:
    """The process' exit code for an exception; None for one that is a fault of streamload."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, (MemoryBudgetError, MemoryError)):
        return 3
    # ValueError: an option's value that only the library can judge.
    if isinstance(error, (StreamloadError, OSError, ValueError)):
        return 1
    return None


def one_line(error: BaseException) -> str:
    """The message on one line, cut after the first few problems."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory"
    parts = [" ".join(printable(part).split()) for part in str(error).splitlines()]
    parts = [part for part in parts if part] or [type(error).__name__]
    more = len(parts) - _MAX_PARTS
    if more > 0:
        parts = [*parts[:_MAX_PARTS], f"… and {more} more (--json or `streamload plan` lists all)"]
    # A headline ends with a colon, problems after it are told apart by semicolons.
    text = parts[0]
    for part in parts[1:]:
        text += f" {part}" if text.endswith(":") else f"; {part}"
    return text


@contextlib.contextmanager
def failures_as_one_line(*, traceback: bool = False) -> Iterator[None]:
    """Turn what the block raises into a line on stderr and ``SystemExit``.

    Errors of unknown kinds are faults of streamload itself and keep their traceback.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader of stdout went away (``| head``): stop quietly, also at the exit's flush.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        if traceback or _wants_traceback():
            traceback_module.print_exc()
        click.echo(f"streamload: error: {one_line(error)}", err=True)
        raise SystemExit(code) from None


def _wants_traceback() -> bool:
    """True if ``--traceback`` was given after the command's name."""
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().meta.get("streamload.traceback"))
