"""Which method a configuration names, and what it makes of a catalog. No torch import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    field = next((name for name in FIELDS if config and config.get(name)), None)
    if field is None or config is None:
        return None
    settings = config[field] if isinstance(config[field], Mapping) else {}
    method = str(settings.get("quant_method") or "")
    found = Found(stored, settings, method, field, read)
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
