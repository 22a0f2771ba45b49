"""How a load opens its checkpoint: the stored tensors, as the values that they stand for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamload.adapters.merged_source import with_adapters
from streamload.core.options import Settings
from streamload.sources.base import Source
from streamload.sources.detect import open_layers
from streamload.sources.wrapping.decoded_source import as_stored, decoded

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def open_values(
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    module: nn.Module | None = None,
    keeps_encoded: bool = False,
) -> Iterator[Source]:
    """Open a checkpoint: what is encoded stands in its catalog as decoded, adapters are merged.

    Args:
        path: see ``load``.
        settings: which part of it is wanted, and with which adapters.
        module: what is loaded into; what it takes as it is stored is not decoded.
        keeps_encoded: all is given out as it is stored, if nobody asks for numbers.
    """
    with open_layers(path, settings.layers, settings.prefix, settings.reach) as stored:
        if keeps_encoded and settings.dtype is None and not settings.adapter:
            plain = as_stored(stored)
        else:
            plain = decoded(stored, kept=lambda: _names_of(module))
        with with_adapters(plain, settings.adapter) as source:
            yield source


def _names_of(module: nn.Module | None) -> list[str]:
    """The names of a module's parameters and buffers."""
    if module is None:
        return []
    groups = (module.named_parameters(), module.named_buffers())
    return [name for group in groups for name, _tensor in group]
