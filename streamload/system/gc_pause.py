"""Makes many small objects without the garbage collector walking them again and again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LOCK = threading.Lock()
_held = 0
_was_enabled = False


@contextmanager
def without_collections(count: int, *, least: int = 2000) -> Iterator[None]:
    """Pause cyclic collection while ``count`` records are made that all stay.

    A catalogue or plan of a hundred thousand tensors is a million objects without a cycle; half
    of the time would go into looking for one. Below ``least`` records nothing is paused. Several
    threads may be inside; the last one out restores what the first one found.
    """
    global _held, _was_enabled
    if count < least:
        yield
        return
    with _LOCK:
        if _held == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _held += 1
    try:
        yield
    finally:
        with _LOCK:
            _held -= 1
            if _held == 0 and _was_enabled:
                _grow_old()
                gc.enable()


def _grow_old() -> None:
    """Count what was made as looked at; else the next object would set off a walk over all of it.

    To freeze and to thaw puts everything into the oldest generation without looking at it.
    """
    if gc.get_freeze_count():  # the caller's own, which stay frozen
        gc.collect(1)
    else:
        gc.freeze()
        gc.unfreeze()


def calm(count: Callable[..., int]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: ``count`` of the first argument is how many records the function makes."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            first: Any = args[0]
            with without_collections(count(first)):
                return function(*args, **kwargs)

        return called

    return decorate
