"""What a safetensors file cannot hold, found before one is written."""

from __future__ import annotations

from streamload.core.dtypes import BY_NAME
from streamload.planning.records import Plan

# The reference reader of the format knows all the other types; this one torch alone has.
_UNKNOWN = ("C128",)
# The header's key for its map of strings.
_RESERVED = "__metadata__"


def only_writable(plan: Plan) -> Plan:
    """The plan, refused if safetensors cannot hold one of its tensors."""
    problems = tuple(
        f"{tensor.name!r} cannot be written: {why}"
        for tensor in plan.tensors
        if (why := _fault(tensor.name, tensor.dtype))
    )
    return plan.refused(*problems)


def _fault(name: str, dtype: str) -> str:
    if dtype in _UNKNOWN:
        return f"safetensors has no type for {BY_NAME[dtype].torch_name}"
    return name_fault(name)


def name_fault(name: str) -> str:
    """Why no tensor in a safetensors file can have this name, or nothing."""
    if name == _RESERVED:
        return "safetensors reserves that name for the header's metadata"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid Unicode (it has a lone surrogate)"
    return ""
