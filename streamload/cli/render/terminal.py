"""Text on its way to a terminal: how wide that is, what fits, and the one escape.

All text leaves through ``say``: names of tensors, files and models are anybody's, and what a
terminal would take for a command is escaped.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata

import click

from streamload.core.wording import printable, printable_lines

_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# What styled text stands between until it is printed: no file can hold these marks.
_BOLD, _DIM, _PLAIN = (f"\0{os.urandom(8).hex()}\0" for _ in range(3))
_STYLES = {_BOLD: "\x1b[1m", _DIM: "\x1b[2m", _PLAIN: "\x1b[0m"}
_STYLE = re.compile(r"\x1b\[[0-9]*m")
# They join letters and signs in many languages, and are no commands.
_JOINERS = "\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
_USUAL_WIDTH = 80


def say(text: str = "", *, err: bool = False, end: str = "\n", raw: bool = False) -> None:
    """Print, escaped but for line breaks, tabs and joiners.

    Styles show on a terminal only, and not where NO_COLOR is set or TERM is dumb. A line that is
    too long for the terminal continues below at a word's start, further in.

    Args:
        text: any number of lines.
        err: to stderr.
        end: what follows; without a line break the text is a piece of a line and stays as it is.
        raw: for programs (JSON), or as it was written: long lines stay as they are.
    """
    shown = "".join(
        _STYLES.get(part) or printable_lines(part, kept=_JOINERS)
        for part in re.split(f"({'|'.join(_STYLES)})", text)
    )
    width = None if raw or not end.endswith("\n") else width_of(err=err)
    if width is not None:
        shown = "\n".join(_wrapped(line, width) for line in shown.split("\n"))
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    click.echo(shown + end, err=err, color=False if is_plain else None, nl=False)


def is_quiet() -> bool:
    """True if --quiet was given, to the group or to the command."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get("streamload.quiet"))


def note(text: str) -> None:
    """Print on stderr what stands beside a result; nothing with --quiet."""
    if not is_quiet():
        say(text, err=True)


def heading(text: str) -> str:
    """Bold, where that shows."""
    return f"{_BOLD}{printable(text)}{_PLAIN}"


def dimmed(text: str) -> str:
    """Faint, where that shows; line breaks stay."""
    return f"{_DIM}{text}{_PLAIN}"


def is_terminal(*, err: bool = False) -> bool:
    """True if stdout (or stderr) is a terminal."""
    stream = sys.stderr if err else sys.stdout
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, or closed
        return False


def width_of(*, err: bool = False) -> int | None:
    """Columns of the terminal that stdout (or stderr) is, None if it is none.

    ``$COLUMNS`` goes first, as for other programs; 80 where the terminal does not tell.
    """
    if not is_terminal(err=err):
        return None
    told = os.environ.get("COLUMNS", "")
    if told.isascii() and told.isdigit() and int(told) > 0:
        return int(told)
    try:
        columns = os.get_terminal_size((sys.stderr if err else sys.stdout).fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or _USUAL_WIDTH


def cells(text: str) -> int:
    """How many columns a terminal takes for a line; styles take none."""
    text = _STYLE.sub("", text)
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, width: int) -> str:
    """The text in at most ``width`` columns, with an ellipsis in its middle if need be."""
    if cells(text) <= width:
        return text
    if width < 3:
        return _ELLIPSIS[:width]
    end = _fitting(text[::-1], (width - 1) // 2)[::-1]
    return _fitting(text, width - 1 - cells(end)) + _ELLIPSIS + end


def _fitting(text: str, width: int) -> str:
    """The longest beginning of a text that has so many columns."""
    if text.isascii():
        return text[:width]
    taken = 0
    for at, character in enumerate(text):
        taken += _cells_of(character)
        if taken > width:
            return text[:at]
    return text


def _wrapped(line: str, width: int) -> str:
    """One line as several, of whole words; what follows the first is indented further."""
    if len(line) <= width or cells(line) <= width:
        return line
    indent = " " * (min(len(line) - len(line.lstrip(" ")), width // 2) + 2)
    lines: list[str] = []
    held = ""
    for gap, word in re.findall(r"( *)([^ ]+)", line):
        if held and cells(held) + len(gap) + cells(word) > width:
            lines.append(held)
            held = indent + word
        else:
            held += gap + word
    return "\n".join([*lines, held])
