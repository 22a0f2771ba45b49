"""Experts apart and experts stacked, by ``{expert}``: against torch, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload import Chain, Concat, Identity, NameMap, Rule, Split, Stack, Sum, Transpose, Unstack
from streamload.core.specs import TensorSpec
from streamload.mapping.binding import bind_table
from tests.mapping.test_transforms import counted, loaded
from tests.support.tiny import same_bits

GATE, UP = "e.{expert}.gate", "e.{expert}.up"


def apart(experts, *shape):
    """Names and values of experts of two matrices each, last expert first, as files may be."""
    return {
        name.replace("{expert}", str(e)): counted(*shape, start=100 * e + 5000 * at)
        for e in reversed(range(experts))
        for at, name in enumerate((GATE, UP))
    }


def of(values, template):
    count = sum(name.endswith(template.rpartition(".")[2]) for name in values)
    return [values[template.replace("{expert}", str(e))] for e in range(count)]


# Transform between the two names' experts apart and the one stack, and what torch says.
STACKS = [
    (
        Chain(Concat(0), Stack(0)),
        lambda g, u: torch.stack([torch.cat(pair) for pair in zip(g, u, strict=True)]),
    ),
    (
        Chain(Stack(0), Concat(1)),
        lambda g, u: torch.cat([torch.stack(g), torch.stack(u)], 1),
    ),
    (
        Chain(Transpose(), Concat(1), Stack(0)),
        lambda g, u: torch.stack([torch.cat([a.t(), b.t()], 1) for a, b in zip(g, u, strict=True)]),
    ),
    (
        Chain(Stack(0), Concat(1), Transpose(1, 2)),
        lambda g, u: torch.cat([torch.stack(g), torch.stack(u)], 1).transpose(1, 2),
    ),
    (Chain(Stack(0), Stack(1)), lambda g, u: torch.stack([torch.stack(g), torch.stack(u)], 1)),
    (
        Chain(Stack(-1), Concat(0)),
        lambda g, u: torch.cat([torch.stack(g, -1), torch.stack(u, -1)]),
    ),
    (
        Chain(Concat(0), Concat(0)),
        lambda g, u: torch.cat([part for pair in zip(g, u, strict=True) for part in pair]),
    ),
]


@pytest.mark.parametrize(("transform", "torchs"), STACKS)
@settings(deadline=None, max_examples=20)
@given(experts=st.integers(1, 11), rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_experts_of_two_names_become_one_stack(transform, torchs, experts, rows, columns):
    values = apart(experts, rows, columns)
    (found,) = loaded(values, Rule((GATE, UP), "gate_up", transform), chunk_bytes=24)
    assert same_bits(found, torchs(of(values, GATE), of(values, UP)).contiguous())


def test_a_concat_alone_joins_the_experts_of_one_name():
    values = {n: t for n, t in apart(3, 2, 2).items() if n.endswith("gate")}
    (found,) = loaded(values, Rule(GATE, "gate", Concat(1)))
    assert same_bits(found, torch.cat(of(values, GATE), 1))


def test_two_names_may_become_two_stacks():
    values = apart(4, 2, 3)
    found = loaded(values, Rule((GATE, UP), ("gate", "up"), Stack(0)))
    assert same_bits(found[0], torch.stack(of(values, GATE)))
    assert same_bits(found[1], torch.stack(of(values, UP)))


UNSTACKS = [
    Chain(Unstack(0), Split(0)),
    Chain(Split(1), Unstack(0)),
    Chain(Transpose(1, 2), Split(-1), Transpose(1, 2), Unstack(0)),
]


@pytest.mark.parametrize("transform", UNSTACKS)
def test_a_stack_is_cut_into_experts(transform):
    values = apart(11, 2, 3)
    whole = torch.stack([torch.cat(p) for p in zip(of(values, GATE), of(values, UP), strict=True)])
    rule = Rule("gate_up", (GATE, UP), transform)
    binding = bind_table(
        NameMap((rule,)), {"gate_up": TensorSpec("gate_up", "F32", (11, 4, 3), "f")}
    )
    (assignment,) = binding.assignments
    assert assignment.targets[:2] == ("e.0.gate", "e.1.gate")
    assert assignment.targets[-1] == "e.10.up"
    written = Rule("gate_up", assignment.targets, rule.whole)
    found = loaded({"gate_up": whole}, written)
    for name, tensor in zip(assignment.targets, found, strict=True):
        assert same_bits(tensor, values[name])


REFUSED = [
    ((GATE, "up"), "w", Stack(0), "in all of them or in none"),
    (GATE, ("a.{expert}", "b"), Stack(0), "in all of them or in none"),
    (GATE, "w", None, "needs Stack"),
    (GATE, "w", Transpose(), "needs Stack"),
    ((GATE, UP), "w", Stack(0), "makes 2 of 2 names, not 1"),
    ((GATE, UP), "w", Concat(0), "needs Stack"),
    (GATE, "w", Sum(), "Sum and Mean"),
    ("w", GATE, Identity(), "needs Unstack"),
    ("w", GATE, Stack(0), "needs Unstack"),
    ("w", (GATE, UP), Unstack(0), "makes 1 of 1 names, not 2"),
    ("p.{rank}." + GATE, "w", Stack(0), "rank"),
]


@pytest.mark.parametrize(("sources", "targets", "transform", "words"), REFUSED)
def test_rules_that_cannot_be_are_refused_when_they_are_made(sources, targets, transform, words):
    with pytest.raises(ValueError, match=words):
        Rule(sources, targets, transform)
