"""The code of the documentation: what of each page is run, and how.

``python`` blocks share one namespace with all others of their page; one with ``title="NAME"``
becomes that file instead. A line of a ``bash`` block is a command. ``text`` is shown, never run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SHOWN_ONLY = {"text", "json", "yaml"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is to be (or ""), its text, and where it begins."""

    language: str
    title: str
    text: str
    line: int


def pages() -> list[str]:
    """The README and every page of docs/, as paths from the top of the repository."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *found]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        indent, language, rest, code = fence.groups()
        title = re.search(r'title="([^"]+)"', rest)
        lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
        at = text.count("\n", 0, fence.start()) + 2
        found.append(Block(language, title[1] if title else "", "".join(lines), at))
    return found


def runnable(page: str) -> Iterator[Block]:
    """What of a page is to be run.

    Raises:
        AssertionError: a block is of no language that this module knows.
    """
    for block in blocks(page):
        if block.language in _SHOWN_ONLY:
            continue
        assert block.language in ("python", "bash"), (page, block.line, block.language)
        yield block


def commands(block: Block) -> Iterator[str]:
    """The commands of a ``bash`` block; a backslash at its end continues a line."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


class Session:
    """Runs the blocks of one page, in the current folder.

    Args:
        page: for messages.
        stand_in: what is run instead of the text of a block or command: the same, with what needs a
            big model or a network replaced.
    """

    def __init__(self, page: str, stand_in: Callable[[str], str]) -> None:
        self._page = page
        self._stand_in = stand_in
        self._names: dict[str, object] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        text = self._stand_in(block.text)
        if block.title:
            Path(block.title).write_text(text, encoding="utf-8")
        elif block.language == "python":
            # Lines as in the page, so that a traceback tells the one.
            lines = "\n" * (block.line - 1) + text
            exec(compile(lines, self._page, "exec"), self._names)
        else:
            for line in commands(block):
                self._command(line)

    def _command(self, line: str) -> None:
        program, *arguments = shlex.split(self._stand_in(line), comments=True)
        if program == "streamload":
            from streamload.cli import main

            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, (self._page, line, result.output, result.exception)
        elif program == "python":
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, *arguments],
                env=environment, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (self._page, line, done.stderr[-2000:])
        else:
            # Installing is what .ci/run does; here the extras must be there to be installed.
            assert program == "pip", (self._page, line)
            extras = re.findall(r"\[([\w,-]+)\]", line)
            known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            for extra in ",".join(extras).split(",") if extras else []:
                assert re.search(rf"^{extra} = \[", known, re.MULTILINE), (self._page, line, extra)
