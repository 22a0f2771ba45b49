"""Every wait of the device lane is needed: each is taken out in turn, and is missed.

``LANE_ROUNDS=200 pytest tests/engine/test_waits.py`` runs as many rounds, and counts for each
wait in how many of them it is missed; without it there are fewer, up to the first.
"""

import ast
import inspect
import os
import types

import pytest

from streamload.engine.lanes import device
from tests.engine.devices.rounds import check_round

ROUNDS = int(os.environ.get("LANE_ROUNDS", "0"))
SOURCE = inspect.getsource(device)


def is_wait(node):
    """True for a statement that does nothing but wait, or that says when to wait."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and function.attr in ("wait", "synchronize")
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(isinstance(t, ast.Attribute) and t.attr == "event" for t in targets)


def waits():
    return [node for node in ast.walk(ast.parse(SOURCE)) if is_wait(node)]


def without(number):
    """The lane's class with one of its waits left out; None leaves it whole."""
    tree = ast.parse(SOURCE)
    found = [node for node in ast.walk(tree) if is_wait(node)]
    node = None if number is None else found[number]
    for parent in ast.walk(tree):
        for _, body in ast.iter_fields(parent):
            if node is not None and isinstance(body, list) and node in body:
                body[body.index(node)] = ast.copy_location(ast.Pass(), node)
    module = types.ModuleType(f"{device.__name__}_without_{number}")
    exec(compile(tree, f"<without {number}>", "exec"), module.__dict__)
    return module.DeviceLane


@pytest.mark.parametrize("seed", range(ROUNDS or 20))
def test_every_tensor_is_right_with_any_number_of_slots_and_readers(seed):
    check_round(seed)


@pytest.mark.parametrize(
    "number", range(len(waits())), ids=[ast.unparse(n).replace(" ", "") for n in waits()]
)
def test_no_wait_can_be_left_out(number):
    lane, missed = without(number), 0
    for seed in range(ROUNDS or 30):
        try:
            check_round(seed, lane)
        except Exception:
            missed += 1
            if not ROUNDS:
                break
    assert missed
    if ROUNDS:
        print(f"missed in {missed} of {ROUNDS} rounds")


def test_the_waits_are_found_and_nothing_else_is_left_out():
    assert len(waits()) >= 7
    for seed in range(5):
        check_round(seed, without(None))
