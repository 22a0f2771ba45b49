"""Transforms that do not fit are refused before a byte moves, whatever is wrong with them."""

from __future__ import annotations

import pytest
import torch

from streamload import (
    Chain,
    Concat,
    HeadSplit,
    Identity,
    Interleaved,
    Mean,
    MemorySource,
    NameMap,
    Permute,
    Rule,
    Split,
    Sum,
    Transpose,
)
from streamload.core.options import Settings
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.mapping.applying import apply
from streamload.mapping.layout import Axis, Layout, LayoutError, Piece
from streamload.planning.build import build_plan
from tests.mapping.test_transforms import counted, exported, loaded
from tests.support.tiny import same_bits

NEGATIVE = [
    (Transpose(-1, -2), lambda w: [w.t()]),
    (Transpose(0, -1), lambda w: [w.t()]),
    (Permute((-1, 0)), lambda w: [w.t()]),
    (Split(-1, (1, 3)), lambda w: list(w.split((1, 3), -1))),
    (Split(-2), lambda w: list(w.chunk(3, -2))),
]


@pytest.mark.parametrize(("transform", "torchs"), NEGATIVE)
def test_dimensions_may_be_counted_from_the_end(transform, torchs):
    w = counted(3, 4)
    expected = torchs(w)
    rule = Rule("s", tuple(f"t{chr(97 + i)}" for i in range(len(expected))), transform)
    for found, wanted in zip(loaded({"s": w}, rule), expected, strict=True):
        assert same_bits(found, wanted.contiguous())
    local = dict(zip(rule.targets, (t.contiguous() for t in expected), strict=True))
    assert same_bits(exported(local, rule)[0], w)


def test_concat_along_the_last_dimension_by_a_negative_number():
    parts = {"a": counted(2, 1), "b": counted(2, 3, start=9)}
    rule = Rule(("a", "b"), "w", Concat(-1, (1, 3)))
    (whole,) = loaded(parts, rule)
    assert same_bits(whole, torch.cat(list(parts.values()), -1))
    assert all(map(same_bits, exported({"w": whole}, rule), parts.values()))


MISFITS = [
    (Transpose(0, -3), [(2, 3)], 1),
    (Permute((-3, 0)), [(2, 3)], 1),
    (Permute((0, -2)), [(2, 3)], 1),
    (Split(-3), [(2, 3)], 2),
    (Split(0, (4,)), [(4,)], 2),
    (Split(0, (2, 2)), [(4,)], 1),
    (Concat(-3), [(2, 3), (2, 3)], 1),
    (Concat(0), [(2,), (2,)], 2),
    (Concat(0, each=(Identity(),)), [(2,), (2,)], 1),
    (Identity(), [(2,)], 2),
    (Sum(), [(2,), (2,)], 2),
    (Mean(), [(2,), (2,)], 2),
    (HeadSplit(1, 3), [(3,)], 2),
]


@pytest.mark.parametrize(("transform", "shapes", "count"), MISFITS)
def test_what_does_not_fit_is_a_problem_of_the_plan(transform, shapes, count):
    with pytest.raises(LayoutError):
        apply(transform, shapes, [None] * len(shapes), [None] * count)
    stored = {f"s{chr(97 + i)}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    targets = tuple(f"t{chr(97 + i)}" for i in range(count))
    table = NameMap((Rule(tuple(stored), targets, transform),))
    made = build_plan(MemorySource(stored).catalog, table, None)
    assert not made.ok
    assert "'sa'" in " ".join(made.problems)


BACK = [
    (Identity(), ["a", "b"], {"w": (2,)}),
    (Concat(0, (1, 1)), ["a", "b", "c"], {"w": (2,)}),
    (Split(1), ["a"], {"v": (2,), "w": (2,)}),
    (Split(0, (1, 3)), ["a"], {"v": (2,), "w": (2,)}),
    (Permute((1, 0)), ["a"], {"w": (2, 2, 2)}),
    (Identity(), ["a"], {"v": (2,), "w": (2,)}),
    (HeadSplit(1, 2), ["a"], {"v": (2,), "w": (4,)}),
    (HeadSplit(1, 3), ["a"], {"v": (2,), "w": (2,)}),
]


@pytest.mark.parametrize(("transform", "sources", "shapes"), BACK)
def test_what_does_not_fit_on_the_way_back_is_refused(transform, sources, shapes):
    with pytest.raises(Exception, match="cannot be exported") as caught:
        exported(
            {n: torch.zeros(s) for n, s in shapes.items()}, Rule(sources, [*shapes], transform)
        )
    assert type(caught.value).__name__ == "PlanError"


class Wrong:
    """A caller's own transform that gives whatever it was made with."""

    label, reduces = "wrong", ""

    def __init__(self, *pieces):
        self.pieces = pieces

    def forward(self, layouts, targets):
        del layouts, targets
        return [Layout((4,), self.pieces)]

    def source_shapes(self, targets):
        return list(targets)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (Piece(0, 0, (0,), (Axis(3, 1, 0),)),),
        (Piece(0, 1, (0,), (Axis(4, 1, 0),)),),
        (Piece(0, -1, (0,), (Axis(4, 1, 0),)),),
        (Piece(0, 0, (1,), (Axis(4, 1, 0),)),),
        (Piece(0, 0, (-1,), (Axis(4, 1, 0),)),),
        (Piece(0, 0, (0,), (Axis(4, 2, 0),)),),
        (Piece(0, 0, (0,), (Axis(4, 1, 0, 2),)),),
        (Piece(0, 0, (0,), (Axis(4, 1, 1),)),),
        (Piece(0, 0, (0,), (Axis(4, 1, 0),)), Piece(0, 0, (0,), (Axis(4, 1, 0),))),
    ],
)
def test_no_layout_reaches_outside_or_leaves_elements_open(pieces):
    with pytest.raises(LayoutError):
        apply(Wrong(*pieces), [(4,)], [None], [(4,)])
    plan = build_plan(
        MemorySource({"s": torch.zeros(4)}).catalog,
        NameMap((Rule("s", "t", Wrong(*pieces)),)),
        None,
    )
    assert not plan.ok


def test_a_sum_may_be_relaid_afterwards():
    parts = {"sa": counted(2, 3), "sb": counted(2, 3, start=5)}
    table = NameMap((Rule(tuple(parts), "t", Chain(Sum(), Transpose())),))
    source = MemorySource(parts)
    plan = build_plan(source.catalog, table, None, Settings())
    made = execute(plan, source, CpuLane(chunk_bytes=64)).tensors["t"]
    assert same_bits(made, (parts["sa"] + parts["sb"]).t().contiguous())


@pytest.mark.parametrize(
    "make",
    [
        lambda: HeadSplit(0),
        lambda: HeadSplit(2, 0),
        lambda: Interleaved(0),
        lambda: Interleaved(-2),
        lambda: Chain(),
        lambda: Chain(Concat(0), Sum()),
        lambda: Chain(Mean(), Split(0)),
        lambda: Chain(Sum(), Mean()),
        lambda: Concat(0, (1, 2), (Identity(),)),
        lambda: Concat(0, each=(Sum(), Sum())),
        lambda: Concat(0, ()),
        lambda: Split(0, (3, -1)),
        lambda: Rule("a.weight", "b.{layer}.weight"),
        lambda: Rule("a.{rank}.weight", "b.{rank}.weight", Concat(0)),
        lambda: Rule(("a.{layer}.q", "a.k"), "b.{layer}.qk", Concat(0)),
    ],
)
def test_what_can_never_fit_is_refused_where_it_is_written(make):
    with pytest.raises(ValueError, match=r"."):
        make()


def test_lists_are_taken_for_tuples():
    assert hash(Permute([1, 0])) == hash(Permute((1, 0)))
    assert Split(0, [1, 2]) == Split(0, (1, 2))
