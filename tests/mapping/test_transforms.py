"""Every transform against the torch operation it stands for, and back through an export."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload import (
    Chain,
    Concat,
    Flatten,
    HeadSplit,
    Identity,
    Interleaved,
    Mean,
    MemorySource,
    NameMap,
    Permute,
    Rule,
    Split,
    Stack,
    Sum,
    Transpose,
    Unflatten,
    Unstack,
)
from streamload.core.options import Settings
from streamload.core.specs import contiguous_strides
from streamload.engine.execute import execute
from streamload.engine.lanes.cpu import CpuLane
from streamload.mapping.layout import Layout, LayoutError
from streamload.planning.build import build_plan
from streamload.planning.inverse import build_export_plan
from streamload.planning.records import Targets, TargetSpec
from tests.support.tiny import same_bits

SIZES = st.integers(1, 5)


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) if shape else 1
    return torch.arange(start, start + count).float().reshape(shape)


def loaded(sources, rule, **options):
    """The targets, made by plan and engine from tensors in memory."""
    source = MemorySource(sources)
    plan = build_plan(source.catalog, NameMap((rule,)), None, Settings(**options))
    plan.raise_if_refused()
    made = execute(plan, source, CpuLane(chunk_bytes=plan.options.chunk_bytes)).tensors
    return [made[name] for name in rule.targets]


def exported(locals_, rule):
    """The published tensors, from local ones, by the way back."""
    source = MemorySource(locals_)
    targets = Targets(
        tuple(
            TargetSpec((n,), tuple(t.shape), "F32", is_meta=False, strides=t.stride())
            for n, t in locals_.items()
        )
    )
    plan = build_export_plan(source.catalog.tensors, NameMap((rule,)), targets, Settings())
    plan.raise_if_refused()
    made = execute(plan, source, CpuLane(chunk_bytes=64)).tensors
    return [made[name] for name in rule.sources]


def check(transform, sources, expected, **options):
    """Forward to ``expected`` and back to ``sources``, bit for bit."""
    stored = {f"s{chr(97 + i)}": t for i, t in enumerate(sources)}
    names = tuple(f"t{chr(97 + i)}" for i in range(len(expected)))
    rule = Rule(tuple(stored), names, transform)
    for found, wanted in zip(loaded(stored, rule, **options), expected, strict=True):
        assert same_bits(found, wanted.contiguous())
    local = dict(zip(names, (t.contiguous() for t in expected), strict=True))
    for found, wanted in zip(exported(local, rule), sources, strict=True):
        assert same_bits(found, wanted)


@settings(deadline=None)
@given(rows=SIZES, columns=SIZES, chunk=st.integers(1, 99), staging=st.integers(1, 99))
def test_transpose(rows, columns, chunk, staging):
    w = counted(rows, columns)
    check(Transpose(), [w], [w.t()], chunk_bytes=chunk, staging_bytes=staging)


@settings(deadline=None)
@given(data=st.data())
def test_permute_and_transpose_of_any_dimensions(data):
    shape = data.draw(st.lists(SIZES, min_size=2, max_size=4))
    dims = tuple(data.draw(st.permutations(range(len(shape)))))
    w, staging = counted(*shape), data.draw(st.integers(1, 200))
    check(Permute(dims), [w], [w.permute(dims)], staging_bytes=staging)
    first, second = data.draw(st.permutations(range(len(shape))))[:2]
    check(Transpose(first, second), [w], [w.transpose(first, second)], staging_bytes=staging)


@settings(deadline=None)
@given(data=st.data())
def test_concat_and_split(data):
    dim = data.draw(st.integers(0, 1))
    sizes = tuple(data.draw(st.lists(SIZES, min_size=2, max_size=4)))
    other = data.draw(SIZES)
    shapes = [(size, other) if dim == 0 else (other, size) for size in sizes]
    parts = [counted(*shape, start=100 * i) for i, shape in enumerate(shapes)]
    whole = torch.cat(parts, dim)
    chunk = data.draw(st.integers(1, 99))
    check(Concat(dim, sizes), parts, [whole], chunk_bytes=chunk)
    check(Split(dim, sizes), [whole], parts, chunk_bytes=chunk)


@settings(deadline=None)
@given(parts=st.integers(1, 4), rows=SIZES, columns=SIZES)
def test_split_without_sizes_gives_equal_parts(parts, rows, columns):
    w = counted(parts * rows, columns)
    check(Split(0), [w], list(w.chunk(parts)))


@settings(deadline=None)
@given(heads=SIZES, parts=st.integers(2, 3), size=SIZES, width=SIZES, chunk=st.integers(1, 99))
def test_head_split_is_the_view_by_heads(heads, parts, size, width, chunk):
    """GPT-NeoX: rows are [head][part][head_dim]."""
    w = counted(heads * parts * size, width)
    cut = w.view(heads, parts, size, width)
    expected = [cut[:, part].reshape(heads * size, width) for part in range(parts)]
    check(HeadSplit(heads, parts), [w], expected, chunk_bytes=chunk)
    bias = counted(heads * parts * size)
    cut = bias.view(heads, parts, size)
    check(HeadSplit(heads, parts), [bias], [cut[:, p].reshape(-1) for p in range(parts)])


@settings(deadline=None)
@given(heads=SIZES, pairs=SIZES, width=SIZES, staging=st.integers(1, 200))
def test_interleaved_rows_become_half_split(heads, pairs, width, staging):
    """Meta's LLaMA files: w.view(heads, head_dim/2, 2, D).transpose(1, 2)."""
    w = counted(heads * pairs * 2, width)
    expected = w.view(heads, pairs, 2, width).transpose(1, 2).reshape(heads * pairs * 2, width)
    check(Interleaved(heads), [w], [expected], staging_bytes=staging, chunk_bytes=staging)


@settings(deadline=None)
@given(columns=st.lists(SIZES, min_size=2, max_size=3), width=SIZES)
def test_chains(columns, width):
    w = counted(width, sum(columns))
    parts = list(w.t().split(columns))
    check(Chain(Transpose(), Split(0, tuple(columns))), [w], parts)
    check(
        Chain(Concat(1, tuple(columns)), Transpose()), [p.t().contiguous() for p in parts], [w.t()]
    )


@settings(deadline=None)
@given(heads=SIZES, size=SIZES, width=SIZES)
def test_a_chain_of_heads_and_pairs(heads, size, width):
    q, k = counted(heads * size * 2, width), counted(heads * size * 2, width, start=500)

    def halves(w):
        return w.view(heads, size, 2, width).transpose(1, 2).reshape(-1, width)

    rows = heads * size * 2
    each = (Interleaved(heads), Interleaved(heads))
    check(Concat(0, (rows, rows), each), [q, k], [torch.cat([halves(q), halves(k)])])


@settings(deadline=None)
@given(data=st.data())
def test_stack_and_unstack_along_any_dimension(data):
    shape = tuple(data.draw(st.lists(SIZES, max_size=3)))
    parts = [counted(*shape, start=200 * i) for i in range(data.draw(SIZES))]
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    chunk, staging = data.draw(st.integers(1, 99)), data.draw(st.integers(1, 200))
    whole = torch.stack(parts, dim)
    check(Stack(dim), parts, [whole], chunk_bytes=chunk, staging_bytes=staging)
    check(Unstack(dim), [whole], parts, chunk_bytes=chunk, staging_bytes=staging)


@settings(deadline=None)
@given(data=st.data())
def test_flatten_and_unflatten(data):
    """A convolution's weight [out, in, time, height, width] is a linear one [out, ...]."""
    shape = tuple(data.draw(st.lists(SIZES, min_size=1, max_size=4)))
    first = data.draw(st.integers(0, len(shape) - 1))
    last = data.draw(st.integers(first, len(shape) - 1))
    sizes, w = shape[first : last + 1], counted(*shape)
    flat = w.flatten(first, last)
    check(Flatten(first, last, sizes), [w], [flat], chunk_bytes=data.draw(st.integers(1, 99)))
    check(Flatten(first - len(shape), last - len(shape), sizes), [w], [flat])
    check(Unflatten(first, sizes), [flat], [w])
    check(Unflatten(first - flat.ndim, sizes), [flat], [w])
    turned = Chain(Transpose(0, -1), Flatten())
    assert same_bits(loaded({"s": w}, Rule("s", "t", turned))[0], w.transpose(0, -1).flatten())


@settings(deadline=None)
@given(heads=SIZES, pairs=SIZES, width=SIZES, inverse=st.booleans(), dim=st.integers(-2, 1))
def test_interleaved_along_any_dimension_and_back(heads, pairs, width, inverse, dim):
    """transformers' ``Interleave`` is with one head, its ``PermuteForRope`` with several."""
    w = counted(heads * pairs * 2, width)
    cut = w.view(heads, *((2, pairs) if inverse else (pairs, 2)), width)
    expected = cut.transpose(1, 2).reshape(w.shape)
    if dim % 2:
        w, expected = w.t().contiguous(), expected.t()
    check(Interleaved(heads, dim, inverse), [w], [expected])
    check(Interleaved(heads, dim, not inverse), [expected.contiguous()], [w])


def test_split_with_a_step_for_each_part():
    """Fused rows of which some are rotary: transformers' Chunk, then PermuteForRope of two."""
    w = counted(12, 3)
    q, k, v = w.chunk(3)

    def halves(part):
        return part.view(1, 2, 2, 3).transpose(1, 2).reshape(4, 3)

    each = (Interleaved(1), Interleaved(1), Identity())
    check(Split(0, (4, 4, 4), each), [w], [halves(q), halves(k), v])
    check(Split(0, each=each), [w], [halves(q), halves(k), v])
    with pytest.raises(LayoutError, match="for 3 parts, not 2"):
        Split(0, each=each).forward([Layout.whole(0, (4, 3))], [None, None])


def test_steps_after_a_split_do_not_hide_the_targets_sizes():
    w = counted(3, 6)
    stored = {"s": w}
    rule = Rule("s", ("ta", "tb"), Chain(Transpose(), Split(0), Transpose()))
    source = MemorySource(stored)
    shapes = {"ta": (3, 2), "tb": (3, 4)}
    targets = Targets(tuple(TargetSpec((n,), s, "F32") for n, s in shapes.items()))
    plan = build_plan(source.catalog, NameMap((rule,)), targets, Settings())
    plan.raise_if_refused()
    assert {t.name: t.shape for t in plan.tensors} == shapes


def test_identity():
    check(Identity(), [counted(3, 2)], [counted(3, 2)])
    check(Identity(), [counted()], [counted()])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [(Sum(), torch.full((2, 3), 6.0)), (Mean(tolerance=1e9), torch.full((2, 3), 2.0))],
)
def test_arithmetic_is_done_in_float32_once(transform, expected):
    parts = {f"s{n}": torch.full((2, 3), float(i)) for i, n in enumerate("abc", 1)}
    (found,) = loaded(parts, Rule(tuple(parts), "t", transform))
    assert torch.equal(found, expected)
    with pytest.raises(LayoutError, match="no way back"):
        transform.source_shapes([(2, 3)])


def test_sums_of_small_numbers_do_not_drown():
    parts = {
        f"s{n}": torch.tensor([v]).bfloat16() for n, v in zip("abc", (256.0, 1.0, 1.0), strict=True)
    }
    (found,) = loaded(parts, Rule(tuple(parts), "t", Sum()))
    assert found.dtype == torch.bfloat16
    assert found.item() == 258.0  # added in bfloat16 one after the other it stays 256


MISFITS = [
    (Transpose(), [(3,)]),
    (Transpose(0, 2), [(3, 2)]),
    (Permute((0, 1, 2)), [(3, 2)]),
    (Permute((0, 0)), [(3, 2)]),
    (Concat(0), [(3, 2), (3, 3)]),
    (Concat(2), [(3, 2), (3, 2)]),
    (Concat(0), [(3,), (3, 1)]),
    (Split(0, (2, 2)), [(3, 2)]),
    (Split(1), [(3,)]),
    (Split(0), [(3, 2)]),
    (HeadSplit(2, 3), [(7, 2)]),
    (HeadSplit(2, 3), [()]),
    (HeadSplit(2, 3), [(0, 4)]),
    (Interleaved(2), [(6, 2)]),
    (Interleaved(2), [()]),
    (Sum(), [(2,), (3,)]),
    (Mean(), [(2, 1), (2,)]),
    (Identity(), [(2,), (2,)]),
    (Transpose(), [(2, 2), (2, 2)]),
    (Stack(0), [(2, 2), (2, 3)]),
    (Stack(3), [(2, 2), (2, 2)]),
    (Stack(0), []),
    (Unstack(0), [(3, 2)]),
    (Unstack(2), [(2, 2)]),
    (Unstack(0), [()]),
    (Flatten(), [()]),
    (Flatten(1, 0), [(2, 3)]),
    (Flatten(0, 1, (3, 2)), [(2, 3)]),
    (Unflatten(0, (2, 2)), [(3,)]),
    (Unflatten(1, (2, 2)), [(4,)]),
    (Interleaved(1, 2), [(2, 2)]),
    (Interleaved(1, 1), [(2, 3)]),
]


@pytest.mark.parametrize(("transform", "shapes"), MISFITS)
def test_shapes_that_do_not_fit_are_layout_errors(transform, shapes):
    layouts = [Layout.whole(i, shape, contiguous_strides(shape)) for i, shape in enumerate(shapes)]
    with pytest.raises(LayoutError):
        transform.forward(layouts, [None, None])


@pytest.mark.parametrize(
    ("transform", "label"),
    [
        (Identity(), ""),
        (Transpose(), "transpose"),
        (HeadSplit(2), "head-split"),
        (Chain(Transpose(), Identity(), Split()), "transpose+split"),
        (Concat(), "concat"),
    ],
)
def test_labels(transform, label):
    assert transform.label == label


def test_transforms_are_values():
    assert Transpose() == Transpose()
    assert Chain(Transpose(), Split(0, (1, 2))) == Chain(Transpose(), Split(0, (1, 2)))
    assert len({Concat(0, (1,)), Concat(0, (1,)), Concat(1, (1,))}) == 2
    with pytest.raises(AttributeError):
        Transpose().first = 2  # type: ignore[misc]


def test_what_has_no_way_back_says_so():
    for transform, shapes in (
        (Stack(0), [(0, 2)]),
        (Stack(3), [(2, 2)]),
        (Stack(0), [(2, 2), (2, 2)]),
        (Unstack(0), [(2, 2), (2, 3)]),
        (Flatten(), [(4,)]),
        (Flatten(0, 1, (2, 3)), [(4,)]),
        (Unflatten(0, (2, 3)), [(4, 6)]),
        (Unflatten(3, (2, 3)), [(2, 3)]),
    ):
        with pytest.raises(LayoutError):
            transform.source_shapes(shapes)
    for make in (lambda: Flatten(sizes=()), lambda: Unflatten(0, (-1, 2))):
        with pytest.raises(ValueError, match="sizes cannot be"):
            make()


def test_concat_without_sizes_has_no_way_back():
    with pytest.raises(LayoutError, match="sizes="):
        Concat(0).source_shapes([(4, 2)])
    with pytest.raises(LayoutError, match="cannot cut"):
        Concat(0, (1, 2)).source_shapes([(4, 2)])
