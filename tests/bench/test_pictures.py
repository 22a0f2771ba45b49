"""Pictures and the page, from planted figures."""

from __future__ import annotations

import base64
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.report import page, plots

HEAD = {
    "kind": "run", "path": "gpt2", "dtype": "bfloat16", "workers": 2, "rounds": 2, "cold": False,
    "limit_bytes": None, "started": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.13"},
    "machine": {
        "cpu": "Some <CPU>", "cpus": 2, "memory_bytes": 8 << 30, "system": "Linux 6",
        "filesystem": "ext4", "python": "3.11", "commit": "abc",
    },
}  # fmt: skip


def line(label: str, total_s: float, **more: Any) -> dict[str, Any]:
    mib = 1 << 20
    trace = [[total_s * i / 50, i * 4 * mib, i * 3 * mib, i * mib] for i in range(51)]
    return {
        "kind": "load", "peer": label, "label": label, "delivers": "tensors", "ok": True,
        "reason": None, "values": "right", "import_s": 1.0, "load_s": total_s * 0.8,
        "first_use_s": total_s * 0.2, "total_s": total_s, "bytes_per_s": 1e9,
        "peak_rss_bytes": 200 * mib, "peak_anonymous_bytes": 150 * mib,
        "peak_file_bytes": 50 * mib, "peak_cgroup_bytes": None, "other_cpus": 0.0,
        "stolen_cpus": 0.0, "trace": trace, **more,
    }  # fmt: skip


LINES = [
    HEAD,
    *(line("floor: read + cast", s) for s in (0.3, 0.31)),
    *(line("streamload stream", s) for s in (0.4, 0.42)),
    *(line("a <loader> & more", s, values="wrong: wte.weight") for s in (1.0, 1.2)),
    {"kind": "load", "peer": "x", "label": "absent", "delivers": "?", "ok": False,
     "reason": "x is not installed"},
]  # fmt: skip


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("draw", [plots.time_and_memory, plots.memory_over_time])
def test_pictures_are_twice_the_width_of_a_readme(draw: Any) -> None:
    width, height = size_of(draw(LINES))
    assert width == 1660
    assert 200 < height < 2400


def test_scale_picture() -> None:
    points = [(10.0**n, 0.1 * 10**n, 1e6 * 10**n) for n in range(1, 5)]
    assert size_of(plots.scale({"streamload": points, "other": points}, "tensors"))[0] == 1660


def test_pictures_are_saved_beside_the_figures(tmp_path: Path) -> None:
    written = plots.save_all(LINES, str(tmp_path / "run"))
    assert [Path(path).name for path in written] == ["run-time-memory.png", "run-over-time.png"]
    assert all(Path(path).stat().st_size > 5000 for path in written)


class Reader(HTMLParser):
    """Collects tags left open, what would be fetched, and the table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(LINES, str(path))
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.open == []
    assert len(reader.fetched) == 2
    for source in reader.fetched:
        data = re.fullmatch(r"data:image/png;base64,(.*)", source)
        assert data is not None
        assert size_of(base64.b64decode(data[1]))[0] == 1660
    names = [row[0] for row in reader.rows]
    assert names == [
        "loader", "floor: read + cast", "streamload stream", "a <loader> & more", "absent"
    ]  # fmt: skip
    assert len({len(row) for row in reader.rows}) == 1
    assert "wrong: wte.weight" in reader.rows[3]
    assert "x is not installed" in reader.rows[4]


def test_page_without_one_success_has_no_pictures() -> None:
    text = page.render([HEAD, LINES[-1]])
    assert "<img" not in text
    assert "x is not installed" in text


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


EVIL = (
    "</title></td><script>document.title='EVIL'</script>"
    "<img src=x onerror=\"document.title='EVIL'\">"
    "<b title='\"><svg/onload=document.title='EVIL'>\u202e\x1b[31m\x00"
)


def hostile() -> list[dict[str, Any]]:
    """Every text of a measurement is markup."""
    machine = {**HEAD["machine"], "cpu": EVIL, "filesystem": EVIL, "commit": EVIL}
    head = {**HEAD, "path": EVIL, "dtype": EVIL, "machine": machine, "versions": {EVIL: EVIL}}
    loads = [line(EVIL, s, peer=EVIL, values=f"wrong: {EVIL}") for s in (0.4, 0.42)]
    failed = {**LINES[-1], "label": EVIL, "peer": EVIL, "reason": EVIL}
    return [head, line("floor: read + cast", 0.3), *loads, failed]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_are_never_markup() -> None:
    text = page.render(hostile())
    assert "EVIL" in text
    reader = Reader()
    reader.feed(text)
    assert not re.search(r"<(script|svg|b)\b|[\u202e\x00\x1b]", text)
    tags = {tag for tag, _ in re.findall(r"<(\w+)([^>]*)>", text)}
    plain = {tag for tag, _ in re.findall(r"<(\w+)([^>]*)>", page.render(LINES))}
    assert tags <= plain


@pytest.mark.skipif(BROWSER is None, reason="no browser that runs without a screen")
@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_do_nothing_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(hostile(), str(path))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--dump-dom"]
    run = subprocess.run(
        [str(word) for word in [*command, path.as_uri()]],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", run.stdout, re.DOTALL)
    assert title is not None
    assert title[1].startswith("Loading &lt;/title&gt;")
    assert not re.search(r"<(script|svg)\b", run.stdout)


@pytest.mark.skipif(BROWSER is None, reason="no browser that runs without a screen")
def test_page_opens_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(LINES, str(path))
    # The script asks the browser what it made of the page, and leaves the answer in the title.
    probe = (
        "<script>addEventListener('load', () => { const i = [...document.images];"
        "document.title = ['probe', i.length, i.every(x => x.complete && x.naturalWidth == 1660),"
        "document.querySelectorAll('tbody tr').length, document.querySelectorAll('.bad').length,"
        "document.documentElement.scrollWidth <= innerWidth].join(' ') })</script>"
    )
    path.write_text(path.read_text(encoding="utf-8") + probe, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,1200"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--dump-dom"]
    run = subprocess.run(
        [str(word) for word in [*command, path.as_uri()]],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r"<title>(.*?)</title>", run.stdout)
    assert found is not None
    assert found[1] == "probe 2 true 4 2 true"
