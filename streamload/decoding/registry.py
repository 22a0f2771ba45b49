"""Which function decodes which encoding; each is imported when it is first needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from streamload.decoding.scratch import Parts

# Encoding.kind → the module below ``streamload.decoding`` whose ``decode`` it takes.
_MODULES = {
    "packed": "packed_values",
    "scaled": "scaled_values",
}


class Decoder(Protocol):
    """The function ``decode`` of such a module."""

    def __call__(
        self, encoding: Any, parts: Parts, start: int, stop: int, out: torch.Tensor, /
    ) -> None:
        """Write the values [start, stop) to ``out``.

        Args:
            encoding: of the class that has the kind.
            parts: its stored tensors.
            start: a multiple of its quantum.
            stop: another, or the end; some hundred thousand values on at most, unless the
                quantum is larger.
            out: flat, of the values' dtype, contents as they were.
        """


@cache
def decoder_of(kind: str) -> Decoder:
    """The decoder of all encodings of a kind."""
    found: Decoder = import_module(f"streamload.decoding.{_MODULES[kind]}").decode
    return found
