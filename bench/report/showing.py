"""What commands leave behind: figures as JSON lines, a table, pictures and a page."""

import os
import shutil
import sys
import time
from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeAlias

import click

from bench import checkpoints, generate, scale
from bench.report import tables
from bench.report.figures import write_lines
from bench.report.looks import LOOKS
from bench.report.rows import measured_rows
from streamload.cli.render.tables import say

Line: TypeAlias = dict[str, Any]
REPORTS = {"compare": tables.report, "generate": generate.report, "scale": scale.report}


def tell(text: str) -> None:
    say(text, err=True)


def run(command: str, measured: Iterable[Line]) -> tuple[list[Line], str]:
    """Write the lines to STEM.jsonl as they come, and their table to STEM.md; show it.

    Returns the lines, and STEM.
    """
    name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    stem = os.path.join(checkpoints.results_dir(), name)
    path = f"{stem}.jsonl"
    _make_folder(path)
    try:
        lines = write_lines(measured, path)
    except KeyboardInterrupt:
        tell(f"Interrupted. What was measured until now: python -m bench report {path}")
        raise SystemExit(130) from None
    with open(f"{stem}.md", "w", encoding="utf-8") as file:
        file.write(REPORTS[command](lines) + "\n")
    table(lines)
    say(f"Raw figures: {path}\nTable, whole, as Markdown: {stem}.md")
    return lines, stem


def table(lines: list[Line]) -> None:
    """Print the table; on a terminal as much of it as fits."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(REPORTS[lines[0]["command"]](lines, width))


def pictures(lines: list[Line], stem: str, theme: str) -> None:
    """Draw STEM-….png and say where they are."""
    plots, look = check_drawing(), LOOKS[theme]
    _make_folder(stem)
    if lines[0]["command"] == "scale":
        across = (("size", "bytes of the file"), ("tensors", "number of tensors"))
        drawn = ((kind, scale.series(lines, kind), words) for kind, words in across)
        written = plots.save(
            ((k, plots.scale(lines[0], found, words, look)) for k, found, words in drawn if found),
            stem, look,
        )  # fmt: skip
    elif lines[0]["command"] == "compare":
        written = plots.save_all(lines, stem, look)
    else:
        raise click.UsageError("pictures are drawn of what compare and scale measure")
    for path in written:
        say(f"Picture: {path}")
    if not written:
        say("No picture: nothing was measured that could be drawn.")


def page(lines: list[Line], path: str) -> None:
    """Write the page and say where it is."""
    if lines[0]["command"] != "compare":
        raise click.UsageError("a page is made of what compare measures")
    check_drawing()
    from bench.report import page

    _make_folder(path)
    page.write(lines, path)
    say(f"Page: {path}")


def fail_without_success(lines: list[Line]) -> None:
    """End with 1 if no loader loaded."""
    if not measured_rows(lines):
        raise SystemExit(1)


def _make_folder(path: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror}") from error


def check_drawing() -> ModuleType:
    """What draws, or one line about the extra that brings it: asked before anything is measured."""
    try:
        from bench.report import plots
    except ImportError as error:  # matplotlib is an extra
        raise click.ClickException("pictures need: pip install 'streamload[plot]'") from error
    return plots
