"""A real terminal of a given width: what it shows, and whether a line did not fit."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

HEIGHT = 50


class Terminal:
    """One window of a tmux server of its own; use it in a ``with``."""

    def __init__(self, folder: Path, width: int) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed: nothing can be seen in a real terminal")
        self._socket = folder / f"tmux-{width}"
        self._width = width

    def __enter__(self) -> Terminal:
        size = ("-x", str(self._width), "-y", str(HEIGHT))
        (self._socket.parent / "conf").write_text("set -g history-limit 100000\n")
        self._tmux("new-session", "-d", *size, "sh")
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        config = str(self._socket.parent / "conf")
        command = ["tmux", "-S", str(self._socket), "-f", config, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def run(self, command: str) -> None:
        """Give the window to a command; what it showed stays until the server ends."""
        self._tmux("respawn-pane", "-k", f"{command}; sleep 600")

    def wait_for(self, text: str, *, timeout_s: float = 120.0) -> None:
        until = time.monotonic() + timeout_s
        while not any(line.startswith(text) for line in self.lines()):
            assert time.monotonic() < until, "\n".join(self.lines())
            time.sleep(0.1)

    def screen(self) -> list[str]:
        """What is shown now, without empty lines."""
        return _filled(self._tmux("capture-pane", "-p"))

    def lines(self, *, joined: bool = False) -> list[str]:
        """All that was shown; ``joined`` puts together what did not fit in one line."""
        how = ("-J",) if joined else ()
        return _filled(self._tmux("capture-pane", "-p", "-S", "-", *how))

    def broken(self) -> list[str]:
        """The lines that did not fit, but for those with a word (a path) that fits nowhere."""
        shown = set(self.lines())
        return [
            line
            for line in self.lines(joined=True)
            if line not in shown and max(map(len, line.split())) < self._width - 4
        ]


def _filled(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]
