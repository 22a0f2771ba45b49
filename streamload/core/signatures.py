"""Functions that take LoadOptions show every one of them: in signatures, ``help`` and ``?``.

``LoadOptions`` is the one definition. Type checkers read it through ``Unpack``; what asks a running
Python (``help``, ``inspect.signature``, IPython, Jupyter) sees the options as parameters.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from typing_extensions import get_type_hints

from streamload.core.habits import unknown_options
from streamload.core.options import DEFAULTS, LoadOptions

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = re.compile(r"^( *)\*\*options: see \w+\.\n", re.MULTILINE)


def shows_options(
    options: Any = LoadOptions, *, only: str = "", **defaults: object
) -> Callable[[F], F]:
    """A decorator: in place of ``**options``, the function's signature and docstring have each.

    Args:
        options: the TypedDict that ``**options`` are.
        only: names of those that the function makes use of; all of them by default.
        **defaults: the function's own defaults, where they differ from ``DEFAULTS``.
    """

    def decorate(function: F) -> F:
        shown: Any = function
        names = only.split() or list(options.__annotations__)
        shown.__signature__ = _signature(function, options, names, {**DEFAULTS, **defaults})
        texts = option_texts(options)  # none with python -OO
        entries = "".join(f"{name}: {texts.get(name, '')}\n" for name in names)
        function.__doc__ = _PLACE.sub(
            lambda place: textwrap.indent(entries, place[1]), function.__doc__ or ""
        )
        return function

    return decorate


def answers_unknown(function: F) -> F:
    """A decorator: keyword arguments that there are not are told what they are called here."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not options.keys() <= set(known):
            raise TypeError(unknown_options([n for n in options if n not in known], known))
        return function(*args, **options)

    return call  # type: ignore[return-value]


def _signature(
    function: Callable[..., Any], options: Any, names: list[str], defaults: Mapping[str, object]
) -> inspect.Signature:
    # torch is imported by whoever moves data; the options themselves are known without it.
    hints = get_type_hints(options, localns={"torch": sys.modules.get("torch")})
    signature = inspect.signature(function, eval_str=True)
    *own, _ = signature.parameters.values()
    each = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=hints[name],
        )
        for name in names
    ]
    return signature.replace(parameters=[*own, *each])


def option_texts(options: Any) -> dict[str, str]:
    """Option → what the docstrings of a TypedDict and its bases say of it, lines not indented."""
    found: dict[str, str] = {}
    for kind in (*getattr(options, "__orig_bases__", ()), options):
        part = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"^    (?=\w)", part, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(": ")
            found[name] = text.replace("\n    ", "\n").rstrip()
    return found
