"""The settings at the top of a YAML file, read event by event: nothing is built but what is asked.

Anchors, aliases and merges are not followed, so that a small file cannot stand for a large one;
depth, length and the size of the file are bounded. Values below the top are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from streamload.core.errors import CheckpointError, MissingExtraError
from streamload.core.wording import printable
from streamload.sources.small_files import read_small

# GPT-NeoX's own files have at most 5 KiB. PyYAML takes up to 10 µs for each byte.
_MAX_BYTES = 24 << 10
_MAX_DEPTH = 8
_MAX_CHARS = 200
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_TAG = "tag:yaml.org,2002:"
_SCALARS = ("int", "float", "bool", "null", "str")
_TYPES = frozenset({*_SCALARS, "!", "seq", "map", "timestamp", "binary", "set", "omap", "pairs"})


def read_settings(path: str, wanted: Collection[str]) -> dict[str, object]:
    """What the mapping at the top of a file says of ``wanted``; hyphens in its keys count as
    underscores.

    Returns:
        Text, whole and floating-point numbers, booleans and None; {} if the file holds no mapping.

    Raises:
        MissingExtraError: PyYAML is not installed.
        CheckpointError: not YAML, too large or too deep; or what is wanted stands there twice, is
            no plain value, or comes from elsewhere (an alias, a merge).
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            "PyYAML", extra="neox", purpose=f"reading {printable(path)}"
        ) from error
    try:
        text = read_small(path, max_bytes=_MAX_BYTES).decode("utf-8")
        return dict(_settings(yaml, text, wanted))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"is not YAML that is read here: {error}", path=path) from error


def _settings(yaml: Any, text: str, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    loader = yaml.SafeLoader(text)
    depth, key, seen = 0, None, set()
    while loader.check_event():
        event = loader.get_event()
        if isinstance(event, yaml.events.CollectionEndEvent):
            depth -= 1
        if (tag := getattr(event, "tag", None)) and tag.removeprefix(_TAG) not in _TYPES:
            raise ValueError(f"it has the type {tag[:_MAX_CHARS]!r}")
        if depth == 0 and isinstance(event, yaml.events.DocumentEndEvent):
            # What follows is of another document, which is no part of the settings.
            return
        if depth == 1 and isinstance(event, yaml.events.NodeEvent):
            scalar = event.value if isinstance(event, yaml.events.ScalarEvent) else None
            if key is None:
                key = (scalar or "").replace("-", "_")
                if scalar == "<<" and event.implicit[0]:
                    raise ValueError("it merges other settings in (<<), which is not followed")
                if scalar is None and isinstance(event, yaml.events.AliasEvent):
                    raise ValueError(f"a key is the alias *{event.anchor[:_MAX_CHARS]}")
            else:
                if key in wanted:
                    if key in seen:
                        raise ValueError(f"it has {key!r} twice")
                    seen.add(key)
                    yield key, _plain(loader, yaml, event, key)
                key = None
        if isinstance(event, yaml.events.CollectionStartEvent):
            if depth == 0 and not isinstance(event, yaml.events.MappingStartEvent):
                return
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def _plain(loader: Any, yaml: Any, event: Any, key: str) -> object:
    """The value of a scalar, by the types that YAML 1.1 gives plain text."""
    if not isinstance(event, yaml.events.ScalarEvent):
        what = "an alias" if isinstance(event, yaml.events.AliasEvent) else "a list or a mapping"
        raise ValueError(f"{key} is {what}, expected a plain value")
    text: str = event.value
    if len(text) > _MAX_CHARS:
        raise ValueError(f"{key} has {len(text)} characters")
    tag = event.tag
    if tag in (None, "!"):
        tag = loader.resolve(yaml.ScalarNode, text, event.implicit)
    if tag == f"{_TAG}int" and not _INTEGER.fullmatch(text):
        raise ValueError(f"{key} is {text!r}, expected a decimal number of at most 18 digits")
    kinds: dict[str, Callable[..., object]] = {
        f"{_TAG}{kind}": getattr(loader, f"construct_yaml_{kind}") for kind in _SCALARS
    }
    if tag not in kinds:
        raise ValueError(f"{key} is of the type {tag[:_MAX_CHARS]!r}")
    return kinds[tag](yaml.ScalarNode(tag, text))
