"""What our modes over torch's functions have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchMode(TorchFunctionMode):
    """Sees each call of one of torch's functions, in one thread, while its context lasts."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As torch asks for it."""
        del types
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Give what the call returns; ``func(*args, **kwargs)`` lets it be."""
