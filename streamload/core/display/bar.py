"""``progress=True``: one line that says how far a load is, in a terminal or a notebook."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from streamload.core.wording import format_bytes, printable, shortened, without_secrets

if TYPE_CHECKING:
    from streamload.core.options import Progress

_BETWEEN_S = 0.1
_CELLS = 10


@contextmanager
def shown_progress(
    progress: Progress | Literal[True] | None,
    path: str,
    *,
    doing: str = "loading",
    is_shown: bool = True,
) -> Iterator[Progress | None]:
    """What a load calls: the caller's own function, or one that draws a line.

    The line goes to a notebook's cell or, in a terminal, to stderr, where it disappears at the end;
    anywhere else nothing is shown.

    Args:
        progress: as given to the call.
        path: what is loaded, or otherwise dealt with.
        doing: the word for that.
        is_shown: False on all ranks but one.
    """
    if progress is not True:
        yield progress
        return
    draw = (_in_notebook() or _in_terminal()) if is_shown else None
    if draw is None:
        yield None
        return
    name = os.path.basename(without_secrets(path).rstrip("/")) or path
    line = _Line(f"{doing} {name}", draw)
    try:
        yield line
    finally:
        line.end()


Draw = Callable[[str, float, bool], None]


class _Line:
    """Draws ``(text, share, is last)`` now and then."""

    def __init__(self, title: str, draw: Draw) -> None:
        self._title = shortened(printable(title), 40)
        self._draw = draw
        self._start_s = time.perf_counter()
        self._next_s = 0.0
        self._done = self._total = 0

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        del name  # names differ in length, and the line would jump
        self._done, self._total = done_bytes, total_bytes
        now = time.perf_counter()
        if now >= self._next_s:
            self._next_s = now + _BETWEEN_S
            self._show(now, is_last=False)

    def end(self) -> None:
        if self._next_s:  # what is mapped moves nothing
            self._show(time.perf_counter(), is_last=True)

    def _show(self, now_s: float, *, is_last: bool) -> None:
        with suppress(OSError, ValueError):  # a stream that is gone is no reason to stop loading
            self._draw(self._text(now_s), self._share, is_last)

    @property
    def _share(self) -> float:
        return min(self._done / self._total, 1.0) if self._total else 0.0

    def _text(self, now_s: float) -> str:
        elapsed_s = now_s - self._start_s
        rate = format_bytes(int(self._done / elapsed_s)) if elapsed_s > 0 else "0 B"
        done, total = format_bytes(self._done), format_bytes(self._total)
        # Every part keeps its width, so that nothing jumps.
        bytes_done = f"{self._share:4.0%}  {done:>10} of {total}"
        return f"{self._title} {bytes_done}  {rate:>10}/s  {elapsed_s:6.1f} s"


def _in_terminal() -> Draw | None:
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None

    full, empty = "━·" if "utf" in (stream.encoding or "").lower() else "#."

    def draw(text: str, share: float, is_last: bool) -> None:
        # One column stays free: a full line makes some terminals begin the next one.
        width = shutil.get_terminal_size().columns - 1
        if len(text) + _CELLS + 2 <= width:
            filled = int(share * _CELLS)
            text += "  " + full * filled + empty * (_CELLS - filled)
        stream.write(f"\r\x1b[2K{'' if is_last else shortened(text, width)}")
        stream.flush()

    return draw


def _in_notebook() -> Draw | None:
    """A cell's output that is replaced again and again; its last state stays."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from html import escape

    handle: list[Any] = []

    def draw(text: str, share: float, is_last: bool) -> None:
        bar = "" if is_last else f'<progress max="1" value="{share:.3f}"></progress> '
        data = {"text/html": f"<div>{bar}{escape(text)}</div>", "text/plain": text}
        if handle:
            handle[0].update(data, raw=True)
        else:
            handle.append(ipython.display.display(data, raw=True, display_id=True))

    return draw
