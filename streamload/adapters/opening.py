"""How a load opens its checkpoint: the stored tensors, as the values that they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from streamload.adapters.merged_source import with_adapters
from streamload.core.options import Settings
from streamload.sources.base import Source
from streamload.sources.detect import open_layers
from streamload.sources.wrapping.decoded_source import as_stored, decoded


@contextmanager
def open_values(
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    kept: Callable[[], Iterable[str]] = tuple,
    keeps_encoded: bool = False,
) -> Iterator[Source]:
    """Open a checkpoint: what is encoded stands in its catalog as decoded, adapters are merged.

    Args:
        path: see ``load``.
        settings: which part of it is wanted, and with which adapters.
        kept: gives the names of what is taken as it is stored; see ``decoded``.
        keeps_encoded: all is given out as it is stored, if nobody asks for numbers.
    """
    with open_layers(path, settings.layers, settings.prefix, settings.reach) as stored:
        if keeps_encoded and settings.dtype is None and not settings.adapter:
            plain = as_stored(stored)
        else:
            plain = decoded(stored, kept=kept)
        with with_adapters(plain, settings.adapter) as source:
            yield source
