"""Folding of names that repeat."""

from streamload.core.display.folding import fold, indices_text

TIMES = "\N{MULTIPLICATION SIGN}"


def folded(*names):
    return [(row.name_text(), row.count) for row in fold((name, ()) for name in names)]


def test_layers_fold():
    rows = fold((f"h.{i}.{part}", part) for i in range(12) for part in ("ln.weight", "ln.bias"))
    assert [row.name_text(2) for row in rows] == ["ln.weight", "ln.bias"]
    assert {row.block_text() for row in rows} == {f"h.0…h.11 {TIMES}12"}
    assert [row.count for row in rows] == [12, 12]


def test_a_name_alone_stays():
    assert folded("wte.weight", "h.3.x", "ln_f.bias") == [
        ("wte.weight", 1),
        ("h.3.x", 1),
        ("ln_f.bias", 1),
    ]


def test_gaps_and_numeric_order():
    names = [f"h.{i}.x" for i in (10, 2, 0, 1, 7)]
    assert folded(*names) == [("h.{0…2, 7, 10}.x", 5)]
    assert next(iter(fold((n, ()) for n in names))).block_text() == f"h.0…h.2, h.7, h.10 {TIMES}5"


def test_what_differs_does_not_fold():
    rows = fold([("h.0.x", (4,)), ("h.1.x", (4,)), ("h.2.x", (5,))])
    assert [(row.name_text(), row.detail) for row in rows] == [
        ("h.{0…1}.x", (4,)),
        ("h.2.x", (5,)),
    ]


def test_experts_fold_within_layers_and_layers_after():
    names = [f"l.{i}.e.{j}.w" for i in range(3) for j in range(8)]
    assert folded(*names) == [("l.{0…2}.e.{0…7}.w", 24)]


def test_block_rows_stay_together():
    rows = fold((n, ()) for n in ("h.0.a", "h.1.a", "top", "h.0.b", "h.1.b"))
    assert [row.name_text() for row in rows] == ["h.{0…1}.a", "h.{0…1}.b", "top"]


def test_numbers_inside_a_segment_do_not_fold():
    assert folded("ln1.x", "ln2.x") == [("ln1.x", 1), ("ln2.x", 1)]


def test_indices_text():
    assert indices_text((0, 1, 2, 5)) == "0…2, 5"
