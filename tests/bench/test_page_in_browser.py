"""The page in a real browser, on a phone and on a desk, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.report import page
from bench.report.looks import LOOKS
from tests.bench.figures_for_pictures import CASES, LINES, hostile

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WIDTHS = (390, 1300)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no browser that runs without a screen"),
    pytest.mark.filterwarnings("ignore:Glyph"),
]

# What the browser made of a document. Cells that lose something are "clipped", what leaves the
# page is "outside" (a table may, within what it scrolls in).
LOOK = """
function look(doc) {
  const win = doc.defaultView, box = doc.querySelector('.scroll');
  const all = [...doc.querySelectorAll('body *')], cells = [...doc.querySelectorAll('th, td')];
  const names = some => some.map(x => x.tagName + ' ' + x.textContent.slice(0, 30));
  const rgb = text => text.match(/[0-9.]+/g).map(Number);
  const linear = v => v <= 10.2 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const behind = x => {
    const color = x && win.getComputedStyle(x).backgroundColor;
    if (!x) return [255, 255, 255];
    return color == 'rgba(0, 0, 0, 0)' ? behind(x.parentElement) : rgb(color);
  };
  const contrast = x => {
    const a = light(rgb(win.getComputedStyle(x).color)), b = light(behind(x));
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  const text = n => n.nodeType == 3 && n.data.trim();
  const speaks = x => x.offsetHeight && [...x.childNodes].some(text);
  const cut = x => x.scrollWidth > x.clientWidth + 1 || x.scrollHeight > x.clientHeight + 1;
  const out = x => !box.contains(x) && x.getBoundingClientRect().right > win.innerWidth + 1;
  const name = doc.querySelector('tbody th'), before = name.getBoundingClientRect().left;
  box.scrollLeft = 10000;
  const stays = Math.abs(name.getBoundingClientRect().left - before) < 1;
  const reaches = box.scrollLeft + box.clientWidth >= box.scrollWidth - 1;
  box.scrollLeft = 0;
  return {
    width: win.innerWidth, page: doc.scrollingElement.scrollWidth, stays, reaches,
    clipped: names(cells.filter(cut)), outside: names(all.filter(out)),
    scrolls: box.scrollWidth > box.clientWidth + 1,
    heights: [...doc.querySelectorAll('tbody tr')].map(x => x.offsetHeight),
    pictures: [...doc.images].map(x => x.complete ? x.naturalWidth : 0),
    faint: names(all.filter(x => speaks(x) && contrast(x) < 4.5)),
  };
}
"""


def browse(path: Path, scheme: str, *more: str) -> str:
    """What the browser prints."""
    number = {"dark": 0, "light": 1}[scheme]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={number}", "--virtual-time-budget=8000"]
    command += [f"--user-data-dir={path.parent / 'profile'}", *more, path.as_uri()]
    run = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout


def told(path: Path, scheme: str, probe: str, *more: str) -> Any:
    """What the ``probe``, an expression, is once the page is there; it is left in the title."""
    script = (
        f"<script>{LOOK}addEventListener('load', () => setTimeout(() => {{"
        f"document.title = 'PROBE' + JSON.stringify({probe}) }}, 200))</script>"
    )
    path.write_text(path.read_text(encoding="utf-8") + script, encoding="utf-8")
    found = re.search(r"<title>PROBE(.*?)</title>", browse(path, scheme, "--dump-dom", *more))
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Those that differ in more than their pictures."""
    return {
        name: page.render(CASES[name]) for name in ("ordinary", "many", "hostile", "all failed")
    }


@pytest.mark.parametrize("scheme", LOOKS)
def test_nothing_is_cut_off_on_a_phone_or_a_desk(
    tmp_path: Path, pages: dict[str, str], scheme: str
) -> None:
    """All pages at once, in frames that are as wide as the window would be."""
    frames = "".join(
        f'<iframe width="{width}" height="900" style="border: 0; color-scheme: {scheme}" '
        f'srcdoc="{html.escape(text)}"></iframe>'
        for text in pages.values()
        for width in WIDTHS
    )
    path = tmp_path / "frames.html"
    path.write_text(f'<meta name="color-scheme" content="light dark">{frames}', encoding="utf-8")
    probe = "[...document.querySelectorAll('iframe')].map(x => look(x.contentDocument))"
    seen = told(path, scheme, probe, "--window-size=1400,900")
    asked = [(name, width) for name in pages for width in WIDTHS]
    for (name, width), found in zip(asked, seen, strict=True):
        where = f"{name} at {width}: {found}"
        assert found["width"] == width
        assert found["page"] <= width, where
        assert (found["clipped"], found["outside"], found["faint"]) == ([], [], []), where
        assert (found["stays"], found["reaches"]) == (True, True), where
        wide = 1660 if width > page.PHONE_PX else 740
        assert set(found["pictures"]) <= {wide}, where
        if name == "ordinary":
            assert len(found["pictures"]) == 2
            # Rows keep their height: two lines of a name at most.
            assert max(found["heights"]) < 60, where
            assert found["scrolls"] == (width == 390), where


@pytest.mark.parametrize("scheme", LOOKS)
@pytest.mark.parametrize("width", WIDTHS)
def test_screenshots_have_the_page_s_colours_and_a_picture(
    tmp_path: Path, pages: dict[str, str], width: int, scheme: str
) -> None:
    from PIL import Image

    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    path.write_text(pages["ordinary"], encoding="utf-8")
    browse(path, scheme, f"--window-size={width},900", f"--screenshot={shot}")
    look = LOOKS[scheme]
    with Image.open(shot) as image:
        assert image.width == width
        pixels = image.convert("RGB")
    for corner in ((0, 0), (width - 1, 0), (0, 899), (width - 1, 899)):
        assert "#{:02x}{:02x}{:02x}".format(*pixels.getpixel(corner)) == look.paper  # type: ignore[misc]
    counted = pixels.getcolors(1 << 20)
    assert counted is not None
    ours = sum(count for count, color in counted if near(color, look.ours))
    assert ours > 500  # the bar of what is ours


def near(color: Any, name: str) -> bool:
    return all(
        abs(c - int(name[i : i + 2], 16)) < 12 for c, i in zip(color, (1, 3, 5), strict=True)
    )


def test_names_do_nothing_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(hostile(), str(path))
    dom = browse(path, "light", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None
    assert title[1].startswith("Loading &lt;/title&gt;")
    assert not re.search(r"<(script|svg)\b", dom)


def test_the_page_is_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(LINES, str(path))
    probe = (
        "[document.querySelectorAll('tbody tr').length, document.querySelectorAll('.bad').length]"
    )
    assert told(path, "light", probe) == [5, 2]
