"""The records of a plan are frozen and plain, however they are made."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from streamload import NameMap, Rule
from streamload.core.specs import Extent, StridedCopy, TensorSpec
from streamload.mapping.binding import Assignment, bind_table
from streamload.planning.records import MappedView, PlannedTensor, TargetSpec
from streamload.system.gc_pause import without_collections

SPEC = TensorSpec("w", "F32", (2, 3), "f", Extent("f", 8, 24))
COPY = StridedCopy("w", (6,), (1,), 0, (1,), 0)
RECORDS: list[Any] = [
    SPEC,
    SPEC.extent,
    COPY,
    Assignment(("w",), ("v",), layer=3),
    TargetSpec(("v",), (2, 3), "F32", is_meta=False),
    MappedView("w", 0, (3, 1)),
    PlannedTensor("v", (), ("w",), (2, 3), (3, 1), "F32", "F32", (COPY,), layer=3),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_they_are_frozen_equal_and_can_be_copied(record: Any) -> None:
    first = fields(record)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(record, first, None)
    assert not hasattr(record, "__dict__")
    for again in (copy.copy(record), pickle.loads(pickle.dumps(record)), replace(record)):
        assert again == record
        assert hash(again) == hash(record)
        assert again is not record
        assert repr(again) == repr(record)
    assert replace(record, **{first: "other"}) != record


@pytest.mark.parametrize("kind", {type(record) for record in RECORDS}, ids=lambda k: k.__name__)
def test_their_constructors_are_those_of_dataclasses(kind: Any) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [field.name for field in fields(kind)]
    required = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    with pytest.raises(TypeError, match=required[-1]):
        kind(*range(len(required) - 1))
    with pytest.raises(TypeError):
        kind(**dict.fromkeys([*parameters, "more"]))


def test_a_name_with_the_sign_of_a_number_matches_no_template() -> None:
    table = NameMap((Rule("h.{layer}.w", "blocks.{layer}.w"), Rule("h.0.{layer}.v", "v.{layer}.v")))
    stored = {name: replace(SPEC, name=name) for name in ("h.#.w", "h.#.#.v", "h.#.0.v", "h.7.w")}
    binding = bind_table(table, stored)
    assert [a.targets for a in binding.assignments] == [("blocks.7.w",)]
    assert binding.unexpected == ("h.#.w", "h.#.#.v", "h.#.0.v")


class TestThePauseOfTheCollector:
    def test_what_was_made_is_not_walked_afterwards(self) -> None:
        assert gc.isenabled()
        with without_collections(10_000):
            assert not gc.isenabled()
            kept = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
        assert gc.isenabled()
        assert gc.get_count()[0] < gc.get_threshold()[0]
        assert len(kept) == 50_000
        assert gc.get_freeze_count() == 0

    def test_what_a_program_froze_stays_frozen(self) -> None:
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with without_collections(10_000):
                pass
            assert gc.get_freeze_count() >= frozen - 100
        finally:
            gc.unfreeze()
