"""A progress bar on stderr, if that is a terminal: always one line, numbers before names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from streamload.cli.render.terminal import cells, is_quiet, is_terminal, shortened
from streamload.core.wording import printable

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.text import Text

_MOST_CHARS = 200
_BAR_CELLS = 20
_UNITS = ("B", "KiB", "MiB", "GiB")
Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """A callback ``(bytes done, bytes in all, tensor name)`` that draws.

    None without a terminal and with --quiet. Until the first call the bar says what is waited for,
    such as the import of torch; it disappears when all is done.
    """
    if not is_terminal(err=True) or is_quiet():
        yield None
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)

    class Line(progress.ProgressColumn):
        """The whole line as one column: rich would wrap several where they do not fit."""

        max_refresh = None

        def render(self, task: Task) -> Text:
            # One column stays free: a full line makes some terminals begin the next one.
            text = line_of(task, console.width - 1)
            return Text(text, no_wrap=True, overflow="crop", end="")

    with progress.Progress(Line(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, tensor="")

        def show(done_bytes: int, total_bytes: int, tensor: str) -> None:
            name = printable(tensor[:_MOST_CHARS])
            # 0 of a download whose size nobody tells.
            bar.update(task, completed=done_bytes, total=total_bytes or None, tensor=name)

        yield show


def line_of(task: Task, width: int) -> str:
    """What a bar says in so many columns.

    Every part keeps its width while the task runs, so that nothing jumps. Where there is no room,
    the bar goes first, then rate and time left; the name takes what is left.
    """
    if not task.completed and task.total is None:
        return shortened(": ".join(dict.fromkeys((task.description, phase()))), width)
    total = int(task.total or 0)
    done = bytes_of_total(int(task.completed), total)
    percent = f"{min(task.completed / total, 1.0):>4.0%}" if total else ""
    numbers = [text for text in (task.description, percent, done) if text]
    rate, left = _rate(task.finished_speed or task.speed), _left(task.time_remaining)
    parts = [*numbers, rate, left]
    for fewer in (parts, [*numbers, rate], numbers, [percent, done], [percent or done]):
        parts = fewer
        if cells("  ".join(parts)) <= width:
            break
    line = "  ".join(parts)
    name = str(task.fields.get("tensor", ""))
    if total and width - cells(line) >= _BAR_CELLS + 30:
        line = f"{line}  {_bar(task.completed / total)}"
    room = width - cells(line) - 2
    if name and room >= 8:
        line = f"{line}  {shortened(name, room)}"
    return shortened(line, width)


def phase() -> str:
    """What is waited for before the first byte."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "starting"
    # Set by Python's own import system while a module's code runs.
    is_importing = getattr(getattr(torch, "__spec__", None), "_initializing", False)
    return "importing torch" if is_importing else "planning"


def bytes_of_total(done: int, total: int) -> str:
    """``1.25/2.95 GiB`` in the total's unit, the first number as wide as the second."""
    size, unit = float(max(done, total)), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    places = (0, 1, 1, 2)[unit]
    shown = f"{done / 1024**unit:.{places}f}"
    if not total:
        return f"{shown:>6} {_UNITS[unit]}"
    whole = f"{total / 1024**unit:.{places}f}"
    return f"{shown:>{len(whole)}}/{whole} {_UNITS[unit]}"


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return f"{'':>11}"
    if bytes_per_s < 1000 << 20:
        return f"{bytes_per_s / (1 << 20):>5.1f} MiB/s"
    return f"{bytes_per_s / (1 << 30):>5.2f} GiB/s"


def _left(seconds: float | None) -> str:
    if seconds is None:
        return f"{'':>7}"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:>2}:{rest:02d}"


def _bar(share: float) -> str:
    filled = min(int(share * _BAR_CELLS), _BAR_CELLS)
    return "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * filled + " " * (_BAR_CELLS - filled)
