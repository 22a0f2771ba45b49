"""Experts that do not make a whole stack are told one by one; a stack is never half filled."""

from __future__ import annotations

import pickle

import pytest

from streamload import Chain, Concat, NameMap, Rule, Split, Stack, Transpose, Unstack
from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.planning.build import build_plan
from streamload.planning.inverse import build_export_plan
from streamload.planning.records import Targets, TargetSpec
from tests.support.counting import calls_in

EXPERT = "layers.{layer}.experts.{expert}."
DOWN = Rule(EXPERT + "down", "layers.{layer}.down", Stack(0))
GATE_UP = Rule(
    (EXPERT + "gate", EXPERT + "up"), "layers.{layer}.gate_up", Chain(Concat(0), Stack(0))
)
TABLE = NameMap((DOWN, GATE_UP), layers=2)
APART = Rule("layers.{layer}.down", EXPERT + "down", Unstack(0))


def catalog(tensors):
    """Name → shape, or shape and dtype."""
    specs, at = {}, 0
    for name, value in tensors.items():
        shape, dtype = value if str in map(type, value) else (value, "F32")
        size = TensorSpec(name, dtype, shape, "f").nbytes
        specs[name] = TensorSpec(name, dtype, shape, "f", Extent("f", at, size))
        at += size
    return Catalog(specs)


def experts(*counts, names=(("down", (3, 2)), ("gate", (2, 3)), ("up", (2, 3)))):
    """As many experts in each layer."""
    return {
        f"layers.{layer}.experts.{e}.{name}": shape
        for layer, count in enumerate(counts)
        for e in range(count)
        for name, shape in names
    }


def module(*counts, **changes):
    """A module with stacks for as many experts in each layer."""
    shapes = {}
    for layer, count in enumerate(counts):
        shapes[f"layers.{layer}.down"] = (count, 3, 2)
        shapes[f"layers.{layer}.gate_up"] = (count, 4, 3)
    return Targets(tuple(TargetSpec((n,), s, "F32", **changes) for n, s in shapes.items()))


def planned(tensors, targets, table=TABLE, **options):
    return build_plan(catalog(tensors), table, targets, Settings(**options))


def test_layers_may_have_other_numbers_of_experts():
    plan = planned(experts(4, 11), module(4, 11))
    plan.raise_if_refused()
    planned(experts(1, 1), module(1, 1)).raise_if_refused()
    assert plan.report.summary() == "loaded=4 missing=0 unexpected=0 shape_mismatch=0"
    by_name = {t.name: t for t in plan.tensors}
    down = by_name["layers.1.down"]
    assert (down.shape, down.transform, down.layer) == ((11, 3, 2), "stack", 1)
    assert down.sources[2:4] == ("layers.1.experts.2.down", "layers.1.experts.3.down")
    assert by_name["layers.0.gate_up"].transform == "concat+stack"
    assert pickle.loads(pickle.dumps(plan)).tensors == plan.tensors


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("targets", [None, module(8, 8)])
@pytest.mark.parametrize("lacking", [0, 3])
def test_a_gap_is_named_and_its_stack_left_out(strict, targets, lacking):
    stored = experts(8, 8)
    for name in ("down", "up"):
        del stored[f"layers.1.experts.{lacking}.{name}"]
    plan = planned(stored, targets, strict=strict)
    assert plan.ok is not strict
    lines = plan.problems if strict else plan.notices
    for name in ("down", "up"):
        told = f"'layers.1.experts.{lacking}.{name}' is missing"
        assert sum(told in line for line in lines) == 1
    assert sorted(t.name for t in plan.tensors) == ["layers.0.down", "layers.0.gate_up"]
    assert sorted(plan.missing) == ["layers.1.down", "layers.1.gate_up"]


def test_a_last_expert_that_one_name_lacks_is_missed_without_a_module():
    stored = experts(8, 8)
    del stored["layers.0.experts.7.down"]
    plan = planned(stored, None)
    assert "'layers.0.experts.7.down' is missing" in "; ".join(plan.problems)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("have", "room", "words"),
    [
        (7, 8, "'layers.0.experts.7.down' missing"),
        (5, 8, "'layers.0.experts.5.down' and so on missing"),
        (9, 8, "'layers.0.experts.8.gate', 'layers.0.experts.8.up' too many"),
    ],
)
def test_another_number_than_the_module_has_room_for(strict, have, room, words):
    plan = planned(experts(have, 8), module(room, 8), strict=strict)
    assert plan.ok is not strict
    text = "; ".join(plan.problems if strict else plan.notices)
    assert f"'layers.0.down' has room for {room} experts, the file has {have}: " in text
    assert words in text
    assert sorted(plan.missing) == ["layers.0.down", "layers.0.gate_up"]
    assert sorted(t.name for t in plan.tensors) == ["layers.1.down", "layers.1.gate_up"]


@pytest.mark.parametrize("targets", [None, module(6)])
@pytest.mark.parametrize("sizes", [None, (2, 2)])
def test_every_expert_of_another_shape_is_named(targets, sizes):
    stored = experts(6)
    stored["layers.0.experts.2.gate"] = (1, 3)
    stored["layers.0.experts.4.up"] = (2, 4)
    stored["layers.0.experts.5.down"] = (2, 3)
    rule = Rule(GATE_UP.sources, GATE_UP.targets, Chain(Concat(0, sizes), Stack(0)))
    plan = planned(stored, targets, NameMap((DOWN, rule), layers=1))
    found = {(m.source, m.stored_shape, m.shape) for m in plan.report.shape_mismatch}
    assert found == {
        ("layers.0.experts.2.gate", (1, 3), (2, 3)),
        ("layers.0.experts.4.up", (2, 4), (2, 3)),
        ("layers.0.experts.5.down", (2, 3), (3, 2)),
    }
    assert not any("Rule(" in line for line in plan.problems), "one rule would not mend an expert"


def test_experts_that_are_all_turned_are_told_as_they_should_be_stored():
    names = (("down", (2, 3)), ("gate", (2, 3)), ("up", (2, 3)))
    plan = planned(experts(3, names=names), module(3))
    assert [(m.stored_shape, m.shape) for m in plan.report.shape_mismatch] == 3 * [((2, 3), (3, 2))]
    turned = Rule(DOWN.sources, DOWN.targets, Chain(Transpose(), Stack(0)))
    planned(experts(3, names=names), module(3), NameMap((turned, GATE_UP))).raise_if_refused()


@pytest.mark.parametrize("targets", [None, module(4)])
def test_a_stack_of_several_dtypes_is_refused_unless_one_is_asked_for(targets):
    stored = experts(4)
    stored["layers.0.experts.1.down"] = ((3, 2), "BF16")
    stored["layers.0.experts.3.down"] = ((3, 2), "F16")
    plan = planned(stored, targets)
    text = "; ".join(plan.problems)
    for name, dtype in ((1, "BF16"), (3, "F16")):
        assert f"'layers.0.experts.{name}.down' is {dtype}" in text
    assert "most of what is stacked is F32" in text
    assert "dtype=" in text
    loose = planned(stored, targets, strict=False)
    assert not loose.ok, "a dtype that nobody chose is not taken silently"
    one_layer = NameMap(TABLE.rules, layers=1)
    assert planned(stored, targets, one_layer, dtype=BY_NAME["BF16"]).ok
    assert planned(stored, module(4, is_meta=False, strides=None)).ok, "the module's own dtype"
    stored["layers.0.experts.3.down"] = ((3, 2), "I32")
    text = "; ".join(planned(stored, targets, dtype=BY_NAME["BF16"]).problems)
    assert "'layers.0.experts.3.down' is I32" in text
    assert "pass the dtype=" not in text


def test_all_problems_are_listed():
    stored = experts(8, 7, 8, 8)
    del stored["layers.0.experts.5.up"]
    stored["layers.2.experts.4.down"] = (3, 3)
    stored["layers.3.experts.6.gate"] = ((2, 3), "F16")
    text = "; ".join(planned(stored, module(8, 8, 8, 8), NameMap(TABLE.rules, layers=4)).problems)
    for name in ("0.experts.5.up", "1.experts.7.down", "2.experts.4.down", "3.experts.6.gate"):
        assert f"'layers.{name}'" in text


def test_a_number_that_no_file_has_so_many_of_costs_nothing():
    stored = {"layers.0.experts.0.down": (3, 2), "layers.0.experts.999999999.down": (3, 2)}
    plan = planned(stored, module(2))
    assert "'layers.0.experts.1.down'" in "; ".join(plan.problems)
    assert len("; ".join(plan.problems)) < 2000


BAD_STACKS = [
    ((10**9, 0), "1000000000 experts"),
    ((0, 3, 2), "0 experts"),
    ((), "no dimension 0"),
]


@pytest.mark.parametrize(("shape", "words"), BAD_STACKS)
def test_what_cannot_be_unstacked(shape, words):
    plan = planned({"layers.0.down": shape, "x": (1,)}, None, NameMap((APART, Rule("x", "x"))))
    (line,) = plan.problems
    assert "'layers.0.down' cannot be unstacked" in line
    assert words in line


@pytest.mark.parametrize(("room", "told"), [(3, "5.down"), (9, "8.down")])
def test_a_module_with_fewer_or_more_experts_than_the_stack(room, told):
    names = [f"layers.0.experts.{e}.down" for e in range(room)]
    targets = Targets(tuple(TargetSpec((n,), (3, 2), "F32") for n in names))
    text = "; ".join(planned({"layers.0.down": (8, 3, 2)}, targets, NameMap((APART,))).problems)
    assert f"'layers.0.experts.{told}'" in text
    assert "missing" in text


def test_experts_may_be_renamed_one_by_one():
    rules = (
        Rule(EXPERT + "down", "blocks.{layer}.e.{expert}.w2"),
        Rule((EXPERT + "gate", EXPERT + "up"), "blocks.{layer}.e.{expert}.w13", Concat(0, (2, 2))),
    )
    plan = planned(experts(2, 3), None, NameMap(rules, layers=2))
    plan.raise_if_refused()
    assert len(plan.tensors) == 10
    made = {t.name: t for t in plan.tensors}
    assert made["blocks.1.e.2.w13"].sources == (
        "layers.1.experts.2.gate",
        "layers.1.experts.2.up",
    )
    stored = experts(2)
    del stored["layers.0.experts.1.up"]
    text = "; ".join(planned(stored, None, NameMap(rules, layers=1)).problems)
    assert "'layers.0.experts.1.up' is missing" in text


def test_a_rule_that_ignores_experts():
    rules = (*TABLE.rules, Rule(EXPERT + "lora"))
    stored = {**experts(2), "layers.0.experts.1.lora": (1,)}
    plan = planned(stored, module(2), NameMap(rules))
    plan.raise_if_refused()
    assert plan.ignored == ("layers.0.experts.1.lora",)


def held(shapes):
    """A module's real tensors, and its targets."""
    stored = catalog(shapes)
    specs = (TargetSpec((n,), s.shape, s.dtype, is_meta=False) for n, s in stored.items())
    return stored.tensors, Targets(tuple(specs))


def back(shapes, table, **options):
    return build_export_plan(held(shapes)[0], table, held(shapes)[1], Settings(**options))


def test_an_export_gives_each_expert_its_name():
    sized = Rule(GATE_UP.sources, GATE_UP.targets, Chain(Concat(0, (2, 2)), Stack(0)))
    shapes = {n: s.shape for n, s in module(2, 11).by_name.items()}
    plan = back(shapes, NameMap((DOWN, sized), layers=2))
    plan.raise_if_refused()
    assert {t.name: t.shape for t in plan.tensors} == experts(2, 11)
    assert all(len(t.sources) == 1 for t in plan.tensors)


def test_an_export_stacks_what_the_module_has_apart():
    stored = experts(4, 11, names=(("down", (3, 2)),))
    plan = back(stored, NameMap((APART,), layers=2))
    plan.raise_if_refused()
    assert {t.name: t.shape for t in plan.tensors} == {
        "layers.0.down": (4, 3, 2),
        "layers.1.down": (11, 3, 2),
    }


def spoilt(change):
    stored = experts(4, names=(("down", (3, 2)),))
    change(stored)
    return stored


SPOILT = [
    (lambda s: s.pop("layers.0.experts.1.down"), "'layers.0.experts.1.down' missing"),
    (lambda s: s.update({"layers.0.experts.1.down": (2, 3)}), "not of one shape"),
    (lambda s: s.update({"layers.0.experts.1.down": ((3, 2), "F16")}), "experts.1.down' is F16"),
]


@pytest.mark.parametrize(("change", "words"), SPOILT)
def test_experts_that_make_no_stack_are_not_exported(change, words):
    (line,) = back(spoilt(change), NameMap((APART,), layers=1)).problems
    assert words in line


def test_a_concat_without_sizes_has_no_way_back_in_a_stack_either():
    shapes = {n: s.shape for n, s in module(2).by_name.items()}
    (line,) = back(shapes, NameMap(TABLE.rules, layers=1)).problems
    assert "'layers.0.gate_up' cannot be exported: Concat needs sizes= to go back" in line


def test_parts_of_several_dtypes_are_not_rounded_to_the_first():
    rule = Rule("gu", ("g", "u"), Split(0))
    plan = back({"g": ((2, 3), "BF16"), "u": ((2, 3), "F32")}, NameMap((rule,)))
    assert [(t.name, t.dtype) for t in plan.tensors] == [("gu", "F32")]
    plan = back({"g": ((2, 3), "BF16"), "u": ((2, 3), "I32")}, NameMap((rule,)))
    assert "its parts are stored as BF16 and I32" in "; ".join(plan.problems)


@pytest.mark.parametrize("written_out", [False, True])
def test_planning_is_linear_in_the_number_of_experts(written_out):
    def calls(count):
        stored = catalog(experts(*[count] * 4))
        rules = TABLE.rules
        if written_out:
            rules = tuple(
                Rule(
                    tuple(f"layers.{i}.experts.{e}.{n}" for e in range(count)), f"{i}.{n}", Stack()
                )
                for i in range(4)
                for n in ("down", "gate", "up")
            )
        table = NameMap(rules, layers=4)
        return calls_in(lambda: build_plan(stored, table, None).raise_if_refused())

    calls(8)
    small, large = calls(50), calls(500)
    assert large < 11 * small, f"{small} calls for 50 experts a layer, {large} for 500"
