"""``hf:ORG/NAME[@REVISION]`` in the local hub cache: found without network, by its layout.

Layout: ``models--ORG--NAME/refs/REVISION`` holds a commit, ``snapshots/COMMIT/`` holds links
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import os
import re

from streamload.core.errors import CheckpointNotFoundError
from streamload.sources.remote.urls import is_file_address, is_url, parent

HUB_NAME = re.compile(r"hf:(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")

_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".gguf", ".onnx", ".h5")


def is_hub_name(path: str) -> bool:
    """True for ``hf:...``, unless a file of exactly that name is there."""
    return path.startswith("hf:") and not os.path.lexists(path)


def folder_of(path: str | os.PathLike[str]) -> str:
    """The folder where a checkpoint's ``config.json`` and tokenizer lie."""
    given = os.fsdecode(path)
    if is_url(given):
        return parent(given) if is_file_address(given) else given.rstrip("/")
    real = find_in_hub_cache(given) if is_hub_name(given) else given
    return real if os.path.isdir(real) else os.path.dirname(real) or os.curdir


def cache_folder() -> str:
    """Where the hub's own tools keep their files, by the same environment variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return os.path.expanduser(os.environ[variable])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def find_in_hub_cache(path: str) -> str:
    """The snapshot folder of ``hf:ORG/NAME[@REVISION]``.

    Raises:
        CheckpointNotFoundError: the name is malformed, or that revision is not in the cache.
    """
    match = HUB_NAME.fullmatch(path)
    if match is None or {".", ".."} & set(re.split("[:/@]", path)):
        meant = meant_as_hub_name(path)
        raise CheckpointNotFoundError(
            f"expected {meant or 'hf:ORG/NAME or hf:ORG/NAME@REVISION'}", path=path
        )
    folder = os.path.join(cache_folder(), "models--" + match["repo"].replace("/", "--"))
    wanted = match["revision"] or "main"
    commit = _read_reference(os.path.join(folder, "refs", wanted)) or wanted
    if match["revision"] is None and commit == wanted:
        # No reference at all: the only snapshot there is must be meant.
        found = _snapshots(folder)
        commit = found[0] if len(found) == 1 else wanted
    snapshot = os.path.join(folder, "snapshots", commit)
    if re.fullmatch(r"[\w.-]+", commit) and commit not in (".", "..") and os.path.isdir(snapshot):
        return snapshot
    raise CheckpointNotFoundError(
        f"not in the local hub cache ({folder}); fetch it with `streamload download "
        f"{path} DIR`, stream it with download=False, or pass a folder",
        path=path,
    )


def hint(path: str) -> str:
    """What else the cache has of ``path``, for a message: other snapshots, broken-off downloads."""
    match = HUB_NAME.fullmatch(path)
    if match is None:
        return ""
    repo = match["repo"]
    folder = os.path.join(cache_folder(), "models--" + repo.replace("/", "--"))
    whole = [
        name
        for name in _snapshots(folder)
        if any(
            file.endswith((".safetensors", ".bin", ".pt", ".pth"))
            and os.path.exists(os.path.join(folder, "snapshots", name, file))
            for file in _list(os.path.join(folder, "snapshots", name))
        )
    ]
    broken = [name for name in _list(os.path.join(folder, "blobs")) if name.endswith(".incomplete")]
    said = [f"weights are in another snapshot: hf:{repo}@{name}" for name in whole]
    if broken:
        said.append(f"a download was broken off ({len(broken)} .incomplete in {folder})")
    if not said and _snapshots(folder):
        said.append(f"`streamload download hf:{repo} DIR` fetches what is missing")
    return "; ".join(said)


def meant_as_hub_name(path: str) -> str | None:
    """``hf:ORG/NAME`` for a path that does not exist and looks like a name on the hub."""
    for start in ("hf://", "https://huggingface.co/", "https://hf.co/"):
        path = path.removeprefix(start)
    match = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)
    return f"hf:{path}" if match and not path.lower().endswith(_FILES) else None


def _snapshots(folder: str) -> list[str]:
    parent = os.path.join(folder, "snapshots")
    return [name for name in _list(parent) if os.path.isdir(os.path.join(parent, name))]


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read_reference(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(256).strip()
    except (OSError, ValueError):
        return None
