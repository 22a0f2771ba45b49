"""Colours are told apart by everybody, and labels do not cover each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.labels import shortened, spread, wrapped
from bench.report.looks import LOOKS, Look

# How each kind of colour blindness sees linear RGB: Machado, Oliveira and Fernandes, 2009.
EYES = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    weights = (0.2126, 0.7152, 0.0722)
    light = [
        sum(w * v for w, v in zip(weights, linear(colour), strict=True)) for colour in (one, other)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


def seen(colour: str, eye: str) -> tuple[float, float, float]:
    """CIELAB under D65."""
    rgb = linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(w * v for w, v in zip(row, rgb, strict=True)))) for row in EYES[eye]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_lines_have_hues_of_their_own(look: Look, eye: str) -> None:
    hues = [seen(colour, eye) for colour in (look.ours, look.ink, *look.peers)]
    for one, other in itertools.combinations(hues, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 >= 24


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_words_and_lines_stand_out_from_the_page(look: Look) -> None:
    for words in (look.ink, look.muted, look.ours):
        assert contrast(words, look.paper) >= 4.5
    for line in (look.bar, *look.peers):
        assert contrast(line, look.paper) >= 3


@given(st.lists(st.floats(0, 1), max_size=40), st.floats(0.001, 0.2))
def test_labels_are_apart_in_order_and_within_the_picture(places: list[float], gap: float) -> None:
    found = spread(places, gap, 0.0, 1.0)
    gap = min(gap, 1 / (len(places) - 1)) if len(places) > 1 else gap
    order = sorted(range(len(places)), key=lambda at: places[at])
    in_order = [found[at] for at in order]
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(in_order))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)


def test_labels_with_room_stay_and_crowded_ones_move_as_little_as_they_can() -> None:
    assert spread([0.9, 0.1, 0.5], 0.1, 0, 1) == [0.9, 0.1, 0.5]
    assert spread([0.5, 0.5, 0.5], 0.1, 0, 1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.0, 0.0], 0.25, 0, 1) == pytest.approx([0.0, 0.25])
    assert spread([], 0.1, 0, 1) == []


def test_names_are_shortened_in_the_middle() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghij", 7) == "abc…hij"
    assert [len(shortened("x" * 50, most)) for most in range(2, 9)] == list(range(2, 9))


def test_lines_break_only_where_they_may() -> None:
    assert wrapped("aa bb cc", lambda line: len(line) <= 5) == ["aa bb", "cc"]
    assert wrapped("aaaaaaaa b", lambda line: len(line) <= 5) == ["aaaaaaaa", "b"]
    assert wrapped("a b · c", lambda line: len(line) <= 4, " · ") == ["a b", "c"]
