"""Small files: how deep their JSON may nest, whatever the interpreter's own reader takes."""

from __future__ import annotations

import json

import pytest

from streamload.core.errors import CheckpointError
from streamload.sources.small_files import loads_strictly, read_json

DEEPEST = 128


def nested(depth: int, inside: str = "") -> str:
    """A text of ``depth`` arrays and objects in turn; ``inside`` is in the innermost array."""
    opened, closed = ('[{"k":' * (depth // 2), "}]" * (depth // 2))
    middle = f"[{inside}]" if depth % 2 else inside or "0"
    return opened + middle + closed


BESIDE = {
    "nothing": "",
    "brackets in a string": '"[[[[ }}}} ]{"',
    "brackets closed by strings": '"]", "[", "{"',
    "an escaped quote": r'"\" [[[ \\", "]"',
    "an empty string": '"", ""',
    "wide": ", ".join(["[]", "{}", '[[{"a": [1]}]]'] * 50),
}


@pytest.mark.parametrize("inside", BESIDE.values(), ids=BESIDE.keys())
def test_the_depth_is_bounded_exactly(inside):
    # An odd depth has its innermost array for what is beside; "wide" nests four levels in it.
    room = 4 if "[1]" in inside else 0
    deepest = nested(DEEPEST - 1 - room, inside)
    assert loads_strictly(deepest.encode()) == json.loads(deepest)
    assert loads_strictly(f"[{deepest}]".encode()) == [json.loads(deepest)]
    with pytest.raises(ValueError, match=f"nested more than {DEEPEST} levels deep"):
        loads_strictly(f"[[{deepest}]]".encode())


@pytest.mark.parametrize("depth", [DEEPEST + 1, 1000, 5000, 200_000])
@pytest.mark.parametrize("side", ["", "[],", "[[],[]],", '"]",'])
def test_any_depth_is_refused_the_same_way(tmp_path, depth, side):
    (tmp_path / "x.json").write_text(f"[{side}" * depth + "0" + "]" * depth)
    with pytest.raises(CheckpointError, match="not valid JSON: nested more than 128 levels deep"):
        read_json(str(tmp_path / "x.json"))


@pytest.mark.parametrize("text", ["[1, 2", "]", "[1]]", '{"a": "[', "[[[[", '"', "", '{"a":}'])
def test_what_is_no_json_is_told_by_the_reader(text):
    with pytest.raises(ValueError) as told:  # noqa: PT011 - json's own
        loads_strictly(text.encode())
    assert "levels" not in str(told.value)


def test_wide_is_not_deep():
    wide = [[n, {"a": []}] for n in range(1000)]
    assert loads_strictly(json.dumps(wide).encode()) == wide
