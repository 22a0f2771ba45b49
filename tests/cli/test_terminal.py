"""What fits into a line: shortened in the middle, wrapped at words, columns cut to size."""

import re

import pytest

from streamload.cli.render import progress, tables, terminal
from streamload.cli.render.tables import columns

WIDE = "重み.layers.11.attn.é.weight"


@pytest.mark.parametrize("text", ["model.layers.0.attn.weight", WIDE, "🙂" * 9, "e\u0301" * 12, ""])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 9, 10, 200])
def test_shortened(text, width):
    short = terminal.shortened(text, width)
    assert terminal.cells(short) <= width
    if terminal.cells(text) <= width:
        assert short == text
    elif width > 2:
        start, end = short.split("…")
        assert text.startswith(start)
        assert text.endswith(end)
        assert terminal.cells(short) >= width - 2, "a wide character may not fit"


def said(text, monkeypatch, capsys, width):
    monkeypatch.setattr(terminal, "width_of", lambda err=False: width)
    terminal.say(text)
    return capsys.readouterr().out.splitlines()


def test_long_lines_go_on_further_in(monkeypatch, capsys):
    text = (
        "  notice: " + "word " * 20 + "/a/path/that/is/longer/than/the/whole/terminal/is/wide end"
    )
    lines = said(text, monkeypatch, capsys, 40)
    assert [line.strip() for line in " ".join(lines).split()] == text.split()
    assert lines[0].startswith("  notice: word")
    assert all(line.startswith("    ") for line in lines[1:])
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in lines)
    assert said("a  b" * 30, monkeypatch, capsys, None) == ["a  b" * 30]
    # A name with blanks cannot make a line of its own that looks like ours.
    forged = said("name " + "x" * 30 + " streamload: error: no", monkeypatch, capsys, 40)
    assert forged[1].startswith("  streamload")


def test_what_is_for_programs_is_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "width_of", lambda err=False: 40)
    tables.say_result(True, lambda: {"text": "word " * 50}, str)
    assert len(capsys.readouterr().out.splitlines()) == 1


ROWS = [
    ("model.embed.weight", "← wte.weight", "[50257, 1600]", "float32 → bfloat16", "12.5 MiB"),
    ("block", "", "", "", "1.0 GiB"),
    ("  attn.out_projection.weight", f"← {WIDE}", "[1600]", "float32 → bfloat16", "256 B"),
]
FITTED = {"right": frozenset({4}), "least": {0: 12, 1: 8}, "drop": {3: "dtypes", 1: "sources"}}


@pytest.mark.parametrize("width", [*range(40, 130, 7), None])
def test_columns_fit(monkeypatch, width):
    monkeypatch.setattr(tables, "width_of", lambda: width)
    lines = columns(ROWS, **FITTED)
    assert all(terminal.cells(line) <= (width or 999) for line in lines)
    body = [line for line in lines if not line.startswith("(")]
    assert len(body) == 3
    assert len({terminal.cells(line) for line in body}) == 1, "numbers end in one column"
    for line, row in zip(body, ROWS, strict=True):
        assert line.endswith(row[4])
        assert row[2] in line, "shapes are whole or not there"
    assert ("(all float32 → bfloat16)" in lines) == (width is not None and width < 107)
    assert ("(no room here for: sources)" in lines) == (width is not None and width < 47)


def test_a_column_is_the_same_only_where_every_row_has_it(monkeypatch):
    monkeypatch.setattr(tables, "width_of", lambda: 30)
    rows = [("name" * 3, "[3]", "transpose"), ("name" * 4, "[3]", ""), ("name" * 4, "[3]", "")]
    assert columns(rows, least={0: 9}, drop={2: "transforms"})[-1].startswith("name")
    assert "(no room here for: transforms)" in columns(rows, drop={2: "transforms"})


class Task:
    """As rich has it."""

    description = "loading"
    finished_speed = None
    speed = 812.3 * (1 << 20)

    def __init__(self, done, total, name="model.layers.3.self_attn.q_proj.weight"):
        self.completed, self.total, self.fields = done, total, {"tensor": name}
        self.time_remaining = None if not done else 75


@pytest.mark.parametrize("width", [10, 20, 39, 59, 79, 119, 300])
def test_a_bar_is_one_line_of_numbers_then_names(width):
    total = 3 << 30
    lines = [progress.line_of(Task(total * at // 50, total), width) for at in range(51)]
    assert all(terminal.cells(line) <= width for line in lines)
    places = {tuple(m.start() for m in re.finditer(r"%|/3.00|GiB|MiB/s|model", x)) for x in lines}
    assert len(places) == 1, "nothing jumps"
    assert re.search(r"\d%|/3", lines[-1])
    if width >= 119:
        numbers = "loading  100%  3.00/3.00 GiB  812.3 MiB/s   1:15  "
        assert lines[-1].startswith(numbers + "━" * 20)
        assert "model.layers.3.self_attn.q_proj.weight" in lines[-1]


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (0, 999, "  0/999 B"),
        (1536, 4096, "1.5/4.0 KiB"),
        (1 << 20, 4 << 20, "1.0/4.0 MiB"),
        (1 << 30, 10 << 30, " 1.00/10.00 GiB"),
        (5000 << 30, 6000 << 30, "5000.00/6000.00 GiB"),
        (3 << 20, 0, "   3.0 MiB"),
    ],
)
def test_bytes_of_a_total_are_in_its_unit(done, total, shown):
    assert progress.bytes_of_total(done, total) == shown


def test_what_is_waited_for_is_said(monkeypatch):
    import sys
    from types import SimpleNamespace

    def phase(module):
        monkeypatch.setitem(sys.modules, "torch", module)
        return progress.line_of(Task(0, None), 80)

    importing = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    assert phase(importing) == "loading: importing torch"
    assert phase(SimpleNamespace(__spec__=SimpleNamespace())) == "loading: planning"
    monkeypatch.delitem(sys.modules, "torch")
    assert progress.line_of(Task(0, None), 80) == "loading: starting"
    assert progress.line_of(Task(0, None), 10) == "loadi…ting"
