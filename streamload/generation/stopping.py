"""Texts that end a continuation: nothing that may be the beginning of one is given out yet."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Lets a text through, piece by piece, up to the first of several texts.

    Attributes:
        found: one of them has come; nothing more is let through.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise ValueError("a text to stop at must have at least one character")
        self._texts = tuple(texts)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece; returns what is certain to come before any of the texts."""
        if self.found:
            return ""
        text = self._held + piece
        places = [at for stop in self._texts if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = self._may_begin(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was still held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """How many characters at the end may be the beginning of one of the texts."""
        longest = min(max(map(len, self._texts), default=1) - 1, len(text))
        for count in range(longest, 0, -1):
            end = text[len(text) - count :]
            if any(stop.startswith(end) for stop in self._texts):
                return count
        return 0
