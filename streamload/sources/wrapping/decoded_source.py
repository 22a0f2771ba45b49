"""A source whose quantised tensors stand in its catalog as the values they are decoded to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from streamload.core.specs import TensorSpec, stored_parts
from streamload.core.wording import listed, plural, printable
from streamload.decoding.quantized.recognise import find_quantised, without_quantisation
from streamload.decoding.quantized.records import Found, in_words, tail
from streamload.sources.base import Source
from streamload.sources.wrapping.wrapping_source import WrappingSource

# What a method keeps in a tensor that is read while planning is a few lines of JSON.
_MOST_BYTES = 1 << 16


class DecodedSource(WrappingSource):
    """What is quantised is decoded, its scales are used up, and the configuration is silent of it.

    Args:
        inner: has the parts.
        found: what of it is quantised.
        kept: a module's tensors, which are not hidden.
    """

    def __init__(self, inner: Source, found: Found, kept: Iterable[str] = ()) -> None:
        tails = {tail(name) for name in kept}
        ignored = {name for name in found.ignored if tail(name) not in tails}
        super().__init__(inner, found.values.values(), found.used | ignored)
        notices, problems = self.catalog.notices, found.refusals()
        if found.values:
            notices = (*notices, _told(found))
        self.catalog = replace(self.catalog, notices=notices, problems=problems)

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        config, notices = self.inner.config()
        return config and without_quantisation(config), notices


def decoded(source: Source, kept: Callable[[], Iterable[str]] = tuple) -> Source:
    """The source, its quantised tensors decoded, if its configuration says that it has any.

    Args:
        source: an open checkpoint, which the one that is returned closes.
        kept: gives a module's tensors. If scales are among them, it takes all as it is stored.
    """
    found = _found(source)
    if found is None:
        return source
    names = list(kept())
    return source if found.is_wanted_by(names) else DecodedSource(source, found, names)


def as_stored(source: Source) -> Source:
    """The source as it is, with a refusal in its catalog if nothing is known of its method."""
    found = _found(source)
    if found is not None and not found.is_known:
        source.catalog = replace(source.catalog, problems=found.refusals())
    return source


def quantised_lines(source: Source) -> tuple[str, ...]:
    """What is to be said of a checkpoint's quantisation; nothing where it has none.

    Raises:
        CheckpointError: the configuration cannot be used.
    """
    found = _found(source)
    if found is None:
        return ()
    return found.refusals() or (_told(found),)


def codes_notice(source: Source, name: str) -> str | None:
    """What is to be said of a stored tensor whose numbers are codes, or scales of such."""
    found = _found(source)
    for value, spec in found.values.items() if found is not None else ():
        if spec.encoding is not None and name in {part.name for part in stored_parts(spec)}:
            words = spec.encoding.words
            return f"codes as they are stored, not values: a load decodes {value!r} of {words}"
    return None


def _found(source: Source) -> Found | None:
    def read(spec: TensorSpec) -> bytes:
        if spec.extent is None or spec.extent.nbytes > _MOST_BYTES:
            return b""
        buffer = bytearray(spec.extent.nbytes)
        source.read_into(spec.extent, memoryview(buffer), tensor=spec.name)
        return bytes(buffer)

    return find_quantised(source.catalog, source.config()[0], read)


def _told(found: Found) -> str:
    """Which encodings there were, and of how many tensors."""
    counts = Counter(spec.encoding.words for spec in found.values.values() if spec.encoding)
    what = listed(f"{plural(n, 'tensor')} of {words}" for words, n in counts.items())
    return printable(f"{in_words(found)}; decoded: {what}")
