"""Pictures and the page, from planted figures: nothing is cut off or covered, whatever comes."""

from __future__ import annotations

import base64
import itertools
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from bench.report import page, plots
from bench.report.frame import DPI, png
from bench.report.looks import DARK, LIGHT, narrow
from tests.bench.figures_for_pictures import CASES, FAILED, HEAD, LINES, hostile, line

LOOKS = {"light": LIGHT, "dark": DARK, "narrow": narrow(LIGHT)}
DRAWN = {"time and memory": plots.time_and_memory, "over time": plots.memory_over_time}
pytestmark = pytest.mark.filterwarnings("ignore:Glyph")


def size_of(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def words_of(figure: Any) -> list[Text]:
    """What is written in a picture; ticks beyond the end of an axis are not drawn."""
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    words = figure.findobj(lambda found: isinstance(found, Text) and found not in hidden)
    return [text for text in words if text.get_text().strip() and text.get_visible()]


def nothing_is_cut_or_covered(figure: Any) -> None:
    words = words_of(figure)
    boxes = [word.get_window_extent() for word in words]
    width, height = figure.bbox.size
    for word, box in zip(words, boxes, strict=True):
        assert -1 <= box.x0 < box.x1 <= width + 1, word.get_text()
        assert -1 <= box.y0 < box.y1 <= height + 1, word.get_text()
    for (one, a), (other, b) in itertools.combinations(zip(words, boxes, strict=True), 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 0.35 * min(a.height, b.height), (
            one.get_text(),
            other.get_text(),
        )


@pytest.mark.parametrize("what", DRAWN)
@pytest.mark.parametrize(
    ("case", "look"),
    [*((case, "light") for case in CASES), *((case, "narrow") for case in ("ordinary", "many"))],
)
def test_words_are_in_the_picture_and_do_not_cover_each_other(
    case: str, look: str, what: str
) -> None:
    figure = DRAWN[what](CASES[case], LOOKS[look])
    if figure is None:
        undrawn = {"all failed", "floor alone", "nothing known"}
        assert case in (undrawn if what == "over time" else {"all failed"})
        return
    nothing_is_cut_or_covered(figure)
    # There is room left for what is drawn.
    assert all(axis.get_window_extent().width > 0.25 * figure.bbox.width for axis in figure.axes)


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_pictures_say_what_was_measured_on_what_and_when(draw: Any) -> None:
    head = {**HEAD, "machine": {**HEAD["machine"], "cpu": "Some(R) Maker(TM)  7"}}
    words = " ".join(text.get_text() for text in words_of(draw([head, *LINES[1:]])))
    for told in ("gpt2 to bfloat16", "Some Maker 7, 2 CPUs, 8 GiB", "median of 2 rounds",
                 "page cache warm", "2026-01-01"):  # fmt: skip
        assert told in words


def test_each_line_is_named_at_its_end_with_its_figures() -> None:
    figure = plots.memory_over_time(LINES)
    assert figure is not None
    (axis,) = figure.axes
    labels = {text.get_text(): text for text in axis.texts}
    assert set(labels) == {
        "floor: read + cast   0.30 s, peak 200 MiB",
        "streamload stream   0.41 s, peak 200 MiB",
        "a <loader> & more   1.10 s, peak 200 MiB",
    }
    right = axis.get_window_extent().x1
    assert all(text.get_window_extent().x0 > right for text in labels.values())


def test_ours_are_on_top_and_others_in_turns_of_hue_and_dash() -> None:
    traces = [line(name, 1.0 + i) for i, name in enumerate(["streamload x", *"abcdefgh"])]
    figure = plots.memory_over_time([HEAD, *traces])
    assert figure is not None
    drawn = [x for x in figure.axes[0].lines if len(x.get_xdata()) == 51]
    ours, *others = drawn
    assert ours.get_color() == LIGHT.ours
    assert all(ours.get_zorder() > other.get_zorder() for other in others)
    assert all(ours.get_linewidth() > other.get_linewidth() for other in others)
    styles = [(x.get_color(), x.get_dash_capstyle(), str(x._unscaled_dash_pattern)) for x in others]  # type: ignore[attr-defined]
    assert len(set(styles)) == len(others) == 8
    assert len({color for color, *_ in styles[:5]}) == 5


def test_bars_tell_seconds_and_times_the_floor() -> None:
    figure = plots.time_and_memory(LINES)
    assert figure is not None
    left, right = figure.axes
    assert [t.get_text() for t in left.texts] == [
        "0.30 s  1.00x", "0.41 s  1.34x", "1.10 s  3.61x"
    ]  # fmt: skip
    assert [text.get_text() for text in right.texts] == ["200"] * 3


@pytest.mark.parametrize(
    ("what", "look"),
    [("time and memory", "light"), ("over time", "dark"), ("time and memory", "narrow")],
)
def test_pictures_are_twice_as_wide_as_shown_and_small(what: str, look: str) -> None:
    figure = DRAWN[what](LINES, LOOKS[look])
    assert figure is not None
    data = png(figure)
    width, height = size_of(data)
    assert width == (740 if look == "narrow" else 1660)
    assert 200 < height < 2400
    assert len(data) < 100_000


@pytest.mark.parametrize(
    ("sizes", "across"),
    [((100, 1e3, 1e4, 1e5), "number of tensors"), ((5e8, 1.5e9, 3e9, 6e9), "bytes of the file")],
)
def test_scale_picture(sizes: tuple[float, ...], across: str) -> None:
    points = [(size, size / 1e9, size) for size in sizes]
    figure = plots.scale(HEAD, {"streamload": points, "other": points}, across)
    nothing_is_cut_or_covered(figure)
    words = [text.get_text() for text in words_of(figure)]
    assert "1k" in words or "1G" in words
    assert "2026-01-01" in " ".join(words)
    assert not re.search(r"[$\\\\]", " ".join(words))
    assert size_of(png(figure))[0] == 1660


def test_pictures_are_saved_beside_the_figures(tmp_path: Path) -> None:
    written = plots.save_all(LINES, str(tmp_path / "run"))
    written += plots.save_all(LINES, str(tmp_path / "run"), DARK)
    assert [Path(path).name for path in written] == [
        "run-time-memory.png", "run-over-time.png",
        "run-time-memory-dark.png", "run-over-time-dark.png",
    ]  # fmt: skip
    assert all(Path(path).stat().st_size > 5000 for path in written)
    assert plots.save_all(CASES["all failed"], str(tmp_path / "none")) == []


class Reader(HTMLParser):
    """Collects tags left open, what would be fetched, and the table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.rows: list[list[str]] = []
        self.spans: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)
        given = dict(attrs)
        self.fetched += [given[key] or "" for key in ("src", "srcset", "href") if key in given]
        if tag == "tr":
            self.rows.append([])
            self.spans.append(0)
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.spans[-1] += int(given.get("colspan") or 1)

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
    # Two pictures, each for light and dark pages, wide and narrow.
    assert len(reader.fetched) == 8
    widths = []
    for source in reader.fetched:
        data = re.fullmatch(r"data:image/png;base64,(.*)", source)
        assert data is not None
        widths.append(size_of(base64.b64decode(data[1]))[0])
    assert widths == [740, 740, 1660, 1660] * 2
    names = [row[0] for row in reader.rows]
    assert names == [
        "loader", "floor: read + cast", "streamload stream", "a <loader> & more", "absent",
        "streamload map",
    ]  # fmt: skip
    assert len(set(reader.spans)) == 1
    times = [row[reader.rows[0].index("x floor")] for row in reader.rows[1:4]]
    assert times == ["1.00", "1.34", "3.61"]
    assert "wrong: wte.weight" in reader.rows[3]
    assert "x is not installed" in reader.rows[4]
    told = "does not apply: every tensor is cast, so none can be mapped"
    assert told in reader.rows[5]


def test_page_without_one_success_has_no_pictures() -> None:
    text = page.render([HEAD, FAILED])
    assert "<img" not in text
    assert "x is not installed" in text


def test_names_are_never_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "png", lambda _: b"")  # drawn, and not written
    text = page.render(hostile())
    assert "EVIL" in text
    reader = Reader()
    reader.feed(text)
    assert not re.search(r"<(script|svg|b)\b|[\u202e\x00\x1b]", text)
    tags = {tag for tag, _ in re.findall(r"<(\w+)([^>]*)>", text)}
    plain = {tag for tag, _ in re.findall(r"<(\w+)([^>]*)>", page.render(LINES))}
    assert tags <= plain
