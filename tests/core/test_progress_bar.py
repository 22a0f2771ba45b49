"""``progress=True``: a line in a terminal or a notebook, nothing anywhere else."""

from __future__ import annotations

import io
import os
import types

import pytest
import torch

import streamload
from streamload.core.display import bar
from tests.support.tiny import bag as module_of
from tests.support.tiny import write

MIB = 1 << 20


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when it is told to."""
    now = [100.0]
    monkeypatch.setattr(bar, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    # pytest sets sys.stderr itself, after this.
    monkeypatch.setattr(bar, "sys", types.SimpleNamespace(stderr=stream, modules={}))
    return stream


def lines_of(stream) -> list[str]:
    return stream.getvalue().split("\r\x1b[2K")[1:]


def drive(clock, path="/models/gpt2-xl/"):
    with bar.shown_progress(True, path) as progress:
        for quarter in range(5):
            progress(quarter * MIB, 4 * MIB, f"name {quarter}")
            clock[0] += 1


def test_a_terminal_has_one_line_that_goes_away(terminal, clock):
    drive(clock)
    *shown, last = lines_of(terminal)
    assert last == ""
    assert len(shown) == 5
    assert " ".join(shown[2].split()).startswith(
        "loading gpt2-xl 50% 2.0 MiB of 4.0 MiB 1.0 MiB/s 2.0 s ━━━━━"
    )
    assert len(set(map(len, shown))) == 1, "nothing jumps"
    assert shown[4].count("━") == 10


@pytest.mark.parametrize("columns", [20, 40, 60, 120])
def test_it_never_takes_two_lines(terminal, clock, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    drive(clock, "/models/" + "long" * 60)
    assert all(len(line) < columns for line in lines_of(terminal))
    assert len(set(map(len, lines_of(terminal)[:-1]))) == 1
    assert "\n" not in terminal.getvalue()


def test_many_calls_draw_few_times(terminal, clock):
    with bar.shown_progress(True, "x") as progress:
        for step in range(1000):
            progress(step, 1000, "w")
            clock[0] += 0.001
    assert len(lines_of(terminal)) < 15


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, None])
def test_elsewhere_nothing_is_shown(terminal, monkeypatch, environment):
    if environment is None:
        terminal.isatty = lambda: False
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    with bar.shown_progress(True, "x") as progress:
        assert progress is None
    assert terminal.getvalue() == ""


def test_a_program_without_stderr_loads_too(monkeypatch):
    monkeypatch.setattr(bar, "sys", types.SimpleNamespace(stderr=None, modules={}))
    with bar.shown_progress(True, "x") as progress:
        assert progress is None


def test_one_rank_of_several_shows_it(terminal):
    with bar.shown_progress(True, "x", is_shown=False) as progress:
        assert progress is None


def test_it_is_cleared_when_the_load_fails(terminal, clock):
    def load():
        with bar.shown_progress(True, "x") as progress:
            progress(1, 2, "w")
            raise KeyError

    with pytest.raises(KeyError):
        load()
    assert lines_of(terminal)[-1] == ""


def test_a_terminal_that_is_gone_stops_no_load(terminal, clock):
    with bar.shown_progress(True, "x") as progress:
        progress(1, 2, "w")
        terminal.close()
        clock[0] += 1
        progress(2, 2, "w")


def test_a_hostile_path_is_escaped(terminal, clock):
    with bar.shown_progress(True, "/x/\x1b[31mred\u202e") as progress:
        progress(1, 2, "w")
    assert all(line.isprintable() for line in lines_of(terminal))


def test_an_ascii_terminal_gets_ascii(terminal, clock):
    terminal.encoding = "ascii"
    drive(clock)
    assert terminal.getvalue().isascii()


def test_functions_are_called_as_ever(terminal):
    def function(*step):
        del step

    with bar.shown_progress(function, "x") as progress:
        assert progress is function
    with bar.shown_progress(None, "x") as progress:
        assert progress is None
    assert terminal.getvalue() == ""


class Notebook:
    """What IPython offers in a notebook's kernel."""

    kernel = object()

    def __init__(self):
        self.outputs: list[dict[str, str]] = []
        self.display = types.SimpleNamespace(display=self._display)

    def get_ipython(self):
        return self

    def _display(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(data)
        return self

    def update(self, data, *, raw):
        assert raw
        self.outputs.append(data)


def test_a_notebook_has_one_output_that_is_replaced(terminal, clock):
    notebook = Notebook()
    bar.sys.modules["IPython"] = notebook
    drive(clock, "/models/<b>bold</b>")
    assert terminal.getvalue() == ""
    half, last = notebook.outputs[2], notebook.outputs[-1]
    assert '<progress max="1" value="0.500">' in half["text/html"]
    assert "<progress" not in last["text/html"], "it is over"
    assert "b&gt;" in last["text/html"]
    assert "100%" in last["text/plain"]


def test_ipython_in_a_terminal_is_a_terminal(terminal, clock):
    notebook = Notebook()
    notebook.kernel = None
    bar.sys.modules["IPython"] = notebook
    drive(clock)
    assert notebook.outputs == []
    assert len(lines_of(terminal)) > 2


def test_a_load_shows_it(terminal, tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": torch.zeros(MIB)})
    streamload.load_into(module_of({"w": (MIB,)}), path, progress=True)
    *shown, last = lines_of(terminal)
    assert shown[0].startswith("loading x.safetensors")
    assert last == ""


def test_what_is_mapped_is_ready_without_a_bar(terminal, tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": torch.zeros(MIB)})
    streamload.load_into(module_of({"w": (MIB,)}), path, mode="map", progress=True)
    assert terminal.getvalue() == ""


def test_a_conversion_shows_it(terminal, tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": torch.zeros(MIB)})
    streamload.convert(path, tmp_path / "y.safetensors", progress=True)
    assert lines_of(terminal)[0].startswith("converting x.safetensors")
    assert os.path.exists(tmp_path / "y.safetensors")
