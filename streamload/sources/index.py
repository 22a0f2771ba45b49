"""``*.index.json``: which shard holds which tensor, checked before any shard is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping

from streamload.core.errors import CheckpointError, naming, refuse
from streamload.core.specs import Catalog
from streamload.core.wording import listed
from streamload.sources.folders import refuse_missing
from streamload.sources.remote.urls import is_url, join, parent
from streamload.sources.small_files import read_json

_MAX_INDEX_BYTES = 200_000_000
_MAX_SHARDS = 10_000


def read_index(path: str) -> dict[str, str]:
    """The index's ``weight_map``: tensor name to file name, names held inside the folder.

    ``metadata.total_size`` is informative only (published files have it wrong) and not looked at.

    Raises:
        CheckpointError: not JSON, no map, an empty map, or a file name that is not a plain
            relative path below the index's own folder.
    """
    index = read_json(path, max_bytes=_MAX_INDEX_BYTES)
    found = index.get("weight_map") if isinstance(index, dict) else None
    with naming(path):
        if not isinstance(found, dict):
            raise CheckpointError("the index has no weight_map (tensor name to file name)")
        if not found:
            raise CheckpointError("the index's weight_map is empty")
        # Each file name once: thousands of tensors have the same.
        texts = {value for value in found.values() if isinstance(value, str)}
        if len(texts) > _MAX_SHARDS:
            raise CheckpointError(f"names {len(texts)} files; the limit is {_MAX_SHARDS}")
        faults = {value: fault for value in texts if (fault := fault_of_name(value))}
        refuse(
            f"tensor {name!r}: {faults[value] if isinstance(value, str) else fault_of_name(value)}"
            for name, value in found.items()
            if not isinstance(value, str) or value in faults
        )
    return found


def fault_of_name(value: object) -> str | None:
    """Why a file name of the map is refused, or None. Links inside the folder are allowed:
    a hub cache is made of them.
    """
    if not isinstance(value, str) or not value:
        return f"the file name is {value!r}, expected a name"
    parts = value.replace("\\", "/").split("/")
    leaves = (
        "\0" in value
        or "\\" in value
        or "://" in value
        or os.path.isabs(value)
        or ":" in parts[0]
        or any(part in ("", ".", "..") for part in parts)
    )
    return (
        f"the file name {value!r} leads out of the folder, or is no plain name" if leaves else None
    )


def shard_paths(index_path: str, weight_map: Mapping[str, str]) -> list[str]:
    """The shards in the order of their names.

    Raises:
        CheckpointError: shards that are not there, all of them listed.
    """
    folder = parent(index_path)
    names = sorted(set(weight_map.values()))
    paths = [join(folder, name) for name in names]
    if is_url(folder):
        from streamload.sources.remote.remote_folder import are_there

        there = are_there(paths)
    else:
        there = [os.path.exists(path) for path in paths]
    pairs = zip(names, there, strict=True)
    refuse_missing([name for name, is_there in pairs if not is_there], len(names))
    return paths


def check_against_shards(
    index_path: str, weight_map: Mapping[str, str], catalog: Catalog
) -> Catalog:
    """The shards' own headers decide what is there; the index must not promise more.

    Returns:
        The catalog, with a notice for tensors that the index leaves out or misplaces.

    Raises:
        CheckpointError: a tensor of the index is in no shard.
    """
    refuse(
        f"tensor {name!r} is not in {shard!r}, nor in any other shard"
        for name, shard in weight_map.items()
        if name not in catalog
    )
    folder = parent(index_path)
    notices = [
        *catalog.notices,
        *(
            f"the index has {name!r} in {shard!r}, it was found in {catalog[name].file!r}"
            for name, shard in weight_map.items()
            # Whole paths: shards in two subfolders may have one name.
            if catalog[name].file != join(folder, shard)
        ),
    ]
    left_out = [name for name in catalog if name not in weight_map]
    if left_out:
        shown = listed(map(repr, left_out), 4)
        notices.append(
            f"the index leaves out {len(left_out)} tensors that its shards hold: {shown}"
        )
    return Catalog(catalog.tensors, catalog.metadata, tuple(notices))
