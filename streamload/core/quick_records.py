"""Frozen records that cost as little to make as others: a plan is made of some hundred thousand."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def quickly_made(cls: type[_T]) -> type[_T]:
    """Give a frozen dataclass with slots, of plain defaults, a constructor that is not slow.

    The one of ``dataclasses`` goes round the frozen ``__setattr__`` for each field, which takes
    most of the time. Here a draft that is not frozen gets the fields in the same slots, and
    becomes the record once it has them all.
    """
    own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in own]
    draft = type(f"_Draft{cls.__name__}", (), {"__slots__": tuple(names)})
    scope: dict[str, Any] = {"draft": draft, "blank": object.__new__}
    parameters = []
    for field in own:
        assert field.default_factory is MISSING, "a default is a value here"
        if field.default is not MISSING:
            scope[f"default_{field.name}"] = field.default
        has_default = field.default is not MISSING
        parameters.append(f"{field.name}=default_{field.name}" if has_default else field.name)
    lines = [
        f"def __new__(cls, {', '.join(parameters)}):",
        "self = blank(draft)",
        *(f"self.{name} = {name}" for name in names),
        "self.__class__ = cls",
        "return self",
    ]
    exec("\n    ".join(lines), scope)
    made = scope["__new__"]
    made.__annotations__ = dict(cls.__init__.__annotations__)
    made.__qualname__ = f"{cls.__qualname__}.__new__"
    made.__module__ = cls.__module__

    def reduced(self: Any) -> tuple[type, tuple[Any, ...]]:
        """What pickle and copy make it from."""
        return type(self), tuple([getattr(self, name) for name in names])

    cls.__new__ = made  # type: ignore[method-assign]
    cls.__reduce__ = reduced  # type: ignore[method-assign]
    del cls.__init__
    return cls
