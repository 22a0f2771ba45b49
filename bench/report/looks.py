"""Colours and sizes of the pictures, on light and on dark pages, wide and for a phone.

The peers' hues differ from each other, from ours and from the floor's by at least 24 in CIELAB,
also as the three kinds of colour blindness see them, and from the page by a contrast of at least
3. ``tests/bench/test_looks.py`` computes both.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Look:
    """How pictures look: sizes are in inches and points.

    Attributes:
        scheme: ``light`` or ``dark``, as CSS names them.
        peers: hues of other loaders, in turn; the next time round they are dashed.
    """

    scheme: str
    paper: str
    ink: str
    muted: str
    grid: str
    ours: str
    bar: str
    pale: str
    peers: tuple[str, ...]
    width_inches: float = 8.3
    font_points: float = 9
    is_narrow: bool = False


LIGHT = Look(
    scheme="light",
    paper="#ffffff",
    ink="#1a1a1a",
    muted="#595959",
    grid="#dddddd",
    ours="#0b5cad",
    bar="#8c8c8c",
    pale="#e3e3e3",
    peers=("#c43b70", "#ac9112", "#8208ed", "#5c520f", "#d17f5f"),
)
DARK = Look(
    scheme="dark",
    paper="#0d1117",
    ink="#e6e6e6",
    muted="#a3a9b1",
    grid="#30363d",
    ours="#58b4f5",
    bar="#8b929a",
    pale="#3d444d",
    peers=("#dd4244", "#8358fc", "#f29113", "#e1b093", "#31f969"),
)
LOOKS = {look.scheme: look for look in (LIGHT, DARK)}


def narrow(look: Look) -> Look:
    """The same for a phone's width: what stood side by side stands one above the other."""
    return replace(look, width_inches=3.7, font_points=7.5, is_narrow=True)
