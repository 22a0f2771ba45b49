"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from streamload.core.wording import printable

_MOST_CHARS = 200
Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """A callback ``(bytes done, bytes in all, tensor name)`` that draws; None without a terminal.

    Shows the bytes, the rate, the time left and the current tensor; it disappears when done.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[tensor]}", markup=False),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, tensor="")

        def show(done_bytes: int, total_bytes: int, tensor: str) -> None:
            name = printable(tensor[:_MOST_CHARS])
            bar.update(task, completed=done_bytes, total=total_bytes, tensor=name)

        yield show
