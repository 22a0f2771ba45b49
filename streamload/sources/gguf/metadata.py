"""Fields of a GGUF file's metadata, with errors that name the key."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamload.core.errors import CheckpointError
from streamload.sources.gguf.metadata_values import Texts, Value

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Metadata:
    """The pairs of one file.

    Attributes:
        path: the file's, for messages.
        pairs: key → value.
    """

    path: str
    pairs: Mapping[str, Value]

    @property
    def architecture(self) -> str:
        """``general.architecture``; empty if the file has none."""
        return self.text("general.architecture") or ""

    def has(self, key: str) -> bool:
        return key in self.pairs

    def text(self, key: str) -> str | None:
        value = self.pairs.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.pairs.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fault(key, "a bool")
        return value

    def number(self, key: str) -> float | None:
        value = self.pairs.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(key, "a number")
        if value != value or abs(value) == float("inf"):
            raise self.fault(key, "a finite number")
        return float(value)

    def whole(self, key: str, *, least: int = 0) -> int | None:
        """A whole number; an array of one for each layer counts if all are equal."""
        value = self.pairs.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str | Texts):
            if len(set(value)) != 1:
                raise self.fault(key, "one number for all layers")
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
            raise self.fault(key, f"a whole number of at least {least}")
        return value

    def needed(self, key: str, *, least: int = 1) -> int:
        value = self.whole(key, least=least)
        if value is None:
            raise CheckpointError(f"there is no {key!r}, which the model needs", path=self.path)
        return value

    def texts(self, key: str) -> Texts | None:
        value = self.pairs.get(key)
        if value is not None and not isinstance(value, Texts):
            raise self.fault(key, "an array of strings")
        return value

    def numbers(self, key: str) -> Sequence[int] | Sequence[float] | None:
        value = self.pairs.get(key)
        if value is None:
            return None
        if isinstance(value, array):
            return value
        raise self.fault(key, "an array of numbers")

    def fault(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{key!r} is {shown(self.pairs[key])}, expected {expected}", path=self.path
        )


def shown(value: object) -> str:
    """A value for a message or a listing, short whatever it holds."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        kind = "strings" if isinstance(value, Texts) else "numbers"
        few = ", ".join(str(one)[:20] for one in value[:4])
        return f"[{few}{', ...' if len(value) > 4 else ''}] ({len(value)} {kind})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
