"""What an entry's header notes of it: read as input, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streamload.core.specs import Catalog
from streamload.core.wording import printable
from streamload.sources.small_files import loads_strictly

VERSION = 1
_KEY = "streamload_cache"
_LATEST_S = float(1 << 40)


@dataclass(frozen=True)
class Facts:
    """What was noted when the entry was written.

    Attributes:
        plan, files: keys of the plan and of the files it was made by and from.
        source: the checkpoint's path, as it was then.
        dtype: of its floating-point tensors, if they share one.
        written_s: when, in seconds since the epoch.
        notices: what that load told, for later ones.
        crc32: tensor name → checksum of its bytes, eight hexadecimal digits.
        made_with: options beside the dtype that made it what it is, as ``name=value``.
    """

    plan: str
    files: str
    source: str
    dtype: str | None
    written_s: float
    notices: tuple[str, ...] = ()
    crc32: Mapping[str, str] = field(default_factory=dict)
    made_with: tuple[str, ...] = ()

    def metadata(self) -> dict[str, str]:
        """For the header."""
        return {_KEY: json.dumps({"version": VERSION, **asdict(self)})}


def facts_of(catalog: Catalog) -> Facts | None:
    """What an entry's header notes; None if it is nothing that this version has written."""
    try:
        found = loads_strictly(catalog.metadata.get(_KEY, "").encode())
    except ValueError:
        return None
    version = found.pop("version", None) if isinstance(found, dict) else None
    if type(version) is not int or version != VERSION:
        return None
    found.setdefault("made_with", [])  # entries of 0.1 do not tell
    if not (found.keys() == Facts.__dataclass_fields__.keys() and _are_typed(found)):
        return None
    texts = {key: tuple(map(printable, found[key])) for key in ("notices", "made_with")}
    return Facts(**{**found, **texts})


def _are_typed(found: dict[str, Any]) -> bool:
    texts = [found[name] for name in ("plan", "files", "source")]
    texts += [] if found["dtype"] is None else [found["dtype"]]
    sums, written_s = found["crc32"], found["written_s"]
    lists = (found["notices"], found["made_with"])
    if not (all(isinstance(one, list) for one in lists) and isinstance(sums, dict)):
        return False
    texts += [text for one in lists for text in one]
    is_time = type(written_s) in (int, float) and 0 <= written_s < _LATEST_S
    return is_time and all(type(text) is str for text in (*texts, *sums.values()))
