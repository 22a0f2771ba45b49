"""A mapping that was written wrongly: the plan says which line of it, and what was meant."""

import pytest

from streamload import Chain, Concat, NameMap, Rule, Split, Transpose
from streamload.core.options import Settings
from streamload.planning.build import build_plan
from tests.planning.test_plan import catalog, param, targets


def lines(mapping, *, strict=True, names=("tok.weight", "ok"), **stored):
    made = build_plan(
        catalog(**(stored or {"wte__weight": (2, 3), "ok": (2, 3)})),
        mapping,
        targets(*map(param, names)),
        Settings(strict=strict),
    )
    return "; ".join((*made.problems, *made.report.notices))


TYPO = {"wte.weight": "tok.weigth", "ok": "ok"}
SENT = (
    "unexpected (1): 'wte.weight' (mapped to 'tok.weigth', which the module has not; "
    "close to 'tok.weight')"
)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "mapping", [TYPO, TYPO.get, NameMap(tuple(Rule(a, b) for a, b in TYPO.items()))]
)
def test_a_target_that_the_module_has_not_is_named(mapping, strict):
    assert SENT in lines(mapping, strict=strict)


@pytest.mark.parametrize(
    "mapping",
    [
        {"wte.wieght": "tok.weight", "ok": "ok"},
        NameMap((Rule("wte.wieght", "tok.weight"), Rule("ok", "ok"))),
    ],
)
def test_a_source_that_is_not_stored_is_named(mapping):
    said = lines(mapping)
    assert (
        "missing (1): 'tok.weight' (its rule wants 'wte.wieght', which is not stored; "
        "close to 'wte.weight')" in said
    )


def test_of_which_block():
    table = NameMap((Rule("h.{layer}.cfc", "b.{layer}.up"), Rule("ok", "ok")), layers=2)
    said = lines(table, names=("b.1.up", "ok"), h__1__c_fc=(2, 3), ok=(2, 3))
    assert "its rule wants 'h.1.cfc', which is not stored; close to 'h.1.c_fc'" in said


def test_a_stored_source_is_not_said_to_be_lacking():
    table = NameMap((Rule("wte.weight", "tok.weight"), Rule("wte.weight", "ok")))
    said = lines(table)
    assert "matches more than one rule: 'wte.weight' → 'tok.weight' and 'wte.weight' → 'ok'" in said
    assert "which is not stored" not in said


def test_what_was_mapped_stands_before_what_was_not():
    others = {f"a{n}": (2, 3) for n in range(20)}
    said = lines(TYPO, strict=False, wte__weight=(2, 3), ok=(2, 3), **others)
    assert "unexpected (21): 'wte.weight' (mapped to 'tok.weigth'" in said


def test_a_dict_the_wrong_way_round():
    said = lines({"tok.weight": "wte.weight"}, strict=False)
    assert "no name in the mapping is stored, as 'tok.weight' → 'wte.weight'" in said


@pytest.mark.parametrize("source", ["h.*.w", r"h.(\d+).w"])
@pytest.mark.parametrize("target", ["b.0.w", ()])
def test_wildcards_that_are_none(source, target):
    table = NameMap((Rule(source, target), Rule("ok", "ok")))
    said = lines(table, strict=False, h__0__w=(2, 3), ok=(2, 3))
    assert f"no stored name is {source!r}, as a Rule says" in said


def test_a_name_with_a_star_is_a_name():
    table = NameMap((Rule("w*", "tok.weight"), Rule("ok", "ok")))
    assert "as a Rule says" not in lines(table, **{"w*": (2, 3), "ok": (2, 3)})


def test_where_nothing_is_mapped_the_option_is_named():
    assert "mapping=" in lines(None, names=("a", "b"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Chain([Transpose(), Split(0)]), "a step of a Chain is an object like"),
        (lambda: Chain(Transpose, Split(0)), "not Transpose"),
        (lambda: Split(1, each=Transpose()), "a transform for each part, not Transpose"),
        (lambda: Concat(0, each=(Transpose,)), "a transform in each= is an object like"),
    ],
)
def test_what_is_no_transform(make, said):
    with pytest.raises(TypeError) as caught:
        make()
    assert said in str(caught.value)
