"""Progress, on a terminal only."""

import io

from streamload.cli.render.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_nothing_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress_bar("loading") as progress:
        assert progress is None
    assert capsys.readouterr().out == ""


def test_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with progress_bar("loading") as progress:
        progress(1 << 20, 4 << 20, "h.0.[bold]weight")
    shown = terminal.getvalue()
    assert "loading" in shown
    assert "h.0.[bold]weight" in shown
    assert "1.0/4.2 MB" in shown or "1.0/4.0 MiB" in shown
