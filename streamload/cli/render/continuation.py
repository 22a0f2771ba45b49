"""A continuation as it comes: the prompt in front on a terminal, and how fast it was."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from streamload.cli.render.clock import seconds_since_start
from streamload.cli.render.terminal import dimmed, is_quiet, is_terminal, say
from streamload.core.wording import format_bytes, plural
from streamload.generation.stopping import StopTexts
from streamload.system.peaks import StatusReader

if TYPE_CHECKING:
    from streamload.generation.tokenizer import TextStream


class Continuation:
    """Collects tokens, and prints them as they come unless ``silent``.

    Args:
        stream: decodes tokens; None prints their numbers.
        stops: no text from the first of these on is given out.
        silent: print nothing.

    Attributes:
        tokens: those so far.
        text: what they say so far, None without a tokenizer.
        first_token_s: when the first one came, in seconds since the process was started.
        is_over: a text to stop at has come.
    """

    def __init__(self, stream: TextStream | None, stops: tuple[str, ...], *, silent: bool) -> None:
        self._stream = stream
        self._stops = StopTexts(stops)
        self._silent = silent
        self._start_s = self._first_s = self._last_s = time.perf_counter()
        self.tokens: list[int] = []
        self.text = None if stream is None else ""
        self.first_token_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self._stops.found

    def begin(self, prompt: str) -> None:
        """Start the clock; on a terminal, the prompt stands in front."""
        self._start_s = time.perf_counter()
        if is_terminal() and not is_quiet():
            self.show(dimmed(prompt))

    def add(self, token: int) -> None:
        self._last_s = time.perf_counter()
        self.tokens.append(token)
        if self._stream is None:
            self.show(f" {token}" if len(self.tokens) > 1 else str(token))
        else:
            self._extend(self._stops.push(self._stream.push(token)))
        if self.first_token_s is None:
            self.first_token_s, self._first_s = seconds_since_start(), self._last_s

    def end(self) -> float:
        """What was held back, and the end of the line; returns the seconds since ``begin``."""
        if self._stream is not None:
            self._extend(self._stops.push(self._stream.finish()))
            self._extend(self._stops.finish())
        self.show("\n")
        return time.perf_counter() - self._start_s

    def show(self, text: str) -> None:
        if text and not self._silent:
            say(text, end="")

    def speed(self, elapsed_s: float) -> str:
        """One line: tokens, when the first one came, how many a second, memory."""
        parts = [f"{plural(len(self.tokens), 'token')} in {elapsed_s:.2f} s"]
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s:.2f} s after the process started")
        between_s = self._last_s - self._first_s
        if len(self.tokens) > 1 and between_s > 0:
            parts.append(f"{(len(self.tokens) - 1) / between_s:.1f} tokens/s")
        with StatusReader() as status:
            held = status.read()
        parts.append(f"peak memory {format_bytes(max(held.high_water, held.rss))}")
        return "; ".join(parts)

    def _extend(self, piece: str) -> None:
        self.text = (self.text or "") + piece
        self.show(piece)
