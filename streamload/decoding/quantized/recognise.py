"""Which method a configuration names, and what it makes of a catalog. No torch import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamload.core.specs import TensorSpec
from streamload.decoding.quantized import bitsandbytes, compressed, fp8, groups, mxfp4
from streamload.decoding.quantized.grids import GridError
from streamload.decoding.quantized.records import Found

_METHODS: Mapping[str, Callable[[Found], None]] = {
    "fp8": fp8.find,
    "mxfp8": fp8.find,
    "fbgemm_fp8": fp8.find,
    "modelopt": fp8.find,
    "mxfp4": mxfp4.find,
    "compressed-tensors": compressed.find,
    "gptq": groups.find_gptq,
    "awq": groups.find_awq,
    "bitsandbytes": bitsandbytes.find,
}
FIELDS = ("quantization_config", "compression_config")


def find_quantised(
    stored: Mapping[str, TensorSpec],
    config: Mapping[str, Any] | None,
    read: Callable[[TensorSpec], bytes] | None = None,
) -> Found | None:
    """What of a checkpoint is quantised, and how it is decoded; None if nothing says that it is.

    Args:
        stored: the catalog.
        config: as in ``config.json``.
        read: see ``Found``.
    """
    at = next(
        ((holder, name) for holder in _holders(config) for name in FIELDS if holder.get(name)), None
    )
    if at is None:
        return None
    holder, field = at
    settings = holder[field] if isinstance(holder[field], Mapping) else {}
    method = str(settings.get("quant_method") or "")
    found = Found({n: _row_major(s) for n, s in stored.items()}, settings, method, field, read)
    find = _METHODS.get(method)
    if find is None:
        found.is_known = False
        found.problems.append(f"this is not decoded here, only {', '.join(_METHODS)}")
        return found
    try:
        find(found)
    except GridError as error:
        found.problems.append(str(error))
    if not found.values and not found.problems:
        text = "no tensor is stored in that way; if all are plain numbers, take it out"
        found.problems.append(text)
    return found


def _holders(config: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of the language model in one of several parts."""
    if config:
        yield config
        if isinstance(text := config.get("text_config"), Mapping):
            yield text


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as of plain weights."""
    kept = {name: value for name, value in config.items() if name not in FIELDS}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = {name: text[name] for name in text if name not in FIELDS}
    return kept


def _row_major(spec: TensorSpec) -> TensorSpec:
    """A tensor whose bytes are in another order is read as a whole, and put in order."""
    return spec if spec.strides is None else replace(spec, extent=None, strides=None)
