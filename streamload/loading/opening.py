"""How a load opens its checkpoint: the stored tensors, as the values that they stand for."""

from __future__ import annotations

import os

from torch import nn

from streamload.core.options import Settings
from streamload.sources.base import Source
from streamload.sources.detect import open_layers
from streamload.sources.wrapping.decoded_source import as_stored, decoded


def open_values(
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    module: nn.Module | None = None,
    keeps_encoded: bool = False,
) -> Source:
    """Open a checkpoint; what is encoded stands in its catalog as it is decoded.

    Args:
        path: see ``load``.
        settings: which part of it is wanted.
        module: what is loaded into; what it takes as it is stored is not decoded.
        keeps_encoded: without ``dtype``, all is given out as it is stored.
    """
    source = open_layers(path, settings.layers, settings.prefix)
    try:
        if keeps_encoded and settings.dtype is None:
            return as_stored(source)
        return decoded(source, kept=lambda: _names_of(module))
    except BaseException:
        source.close()
        raise


def _names_of(module: nn.Module | None) -> list[str]:
    """The names of a module's parameters and buffers."""
    if module is None:
        return []
    groups = (module.named_parameters(), module.named_buffers())
    return [name for group in groups for name, _tensor in group]
