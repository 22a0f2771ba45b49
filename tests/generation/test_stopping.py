"""Texts that end a continuation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.generation.stopping import StopTexts

FEW = st.text("abc", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(FEW, min_size=1, max_size=3))
def test_all_before_the_first_one_and_nothing_of_it(pieces, stops):
    gate = StopTexts(stops)
    given_out = ""
    for piece in pieces:
        given_out += gate.push(piece)
        if gate.found:
            break
    given_out += gate.finish()
    text = "".join(pieces)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert gate.found == bool(ends)
    if not ends:
        assert given_out == text
        return
    # The first that is complete ends it: a longer one that begins earlier may never come.
    assert text.startswith(given_out)
    assert any(text[len(given_out) :].startswith(stop) for stop in stops)
    assert not any(stop in given_out for stop in stops)


def test_what_cannot_be_the_beginning_comes_at_once():
    gate = StopTexts(["\n\n", "User:"])
    pieces = ["Hello", " Us", "ually\n", "x", "\n", "\n", "more"]
    assert [gate.push(piece) for piece in pieces] == ["Hello", " ", "Usually", "\nx", "", "", ""]
    assert gate.found
    assert gate.finish() == ""
    held = StopTexts(["User:"])
    assert (held.push("by User"), held.finish()) == ("by ", "User")


def test_without_texts_nothing_is_held():
    gate = StopTexts([])
    assert (gate.push("abc"), gate.found, gate.finish()) == ("abc", False, "")
    with pytest.raises(ValueError, match="at least one character"):
        StopTexts([""])
