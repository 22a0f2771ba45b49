"""``hf:ORG/NAME[@REVISION]`` on the hub itself, of one commit throughout."""

from __future__ import annotations

import os
import urllib.parse

from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.sources.hub import HUB_NAME
from streamload.sources.remote.answers import RefusedError
from streamload.sources.remote.sites import Site
from streamload.sources.remote.urls import parse_url
from streamload.sources.small_files import loads_strictly

_ENDPOINT = "https://huggingface.co"
_MOST_BYTES = 16 << 20
_YES = ("1", "on", "true", "yes")


def hub_site(name: str, timeout_s: float) -> Site:
    """The site of a model's files; their names and their commit are the hub's to say.

    Endpoint and token are found as the hub's own tools find them, by the same variables.

    Raises:
        CheckpointNotFoundError: the hub has no such model, or none for us.
        CheckpointError: the hub cannot be asked.
    """
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise CheckpointNotFoundError("expected hf:ORG/NAME or hf:ORG/NAME@REVISION", path=name)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
        raise CheckpointError("HF_HUB_OFFLINE is set: the hub is not asked", path=name)
    repo, revision = match["repo"], match["revision"] or "main"
    endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
    token = _token()
    asked = parse_url(f"{endpoint}/api/models/{repo}/revision/{urllib.parse.quote(revision, '')}")
    site = Site(asked, timeout_s, token=token)
    try:
        found = loads_strictly(site.text(asked.path, most=_MOST_BYTES))
        commit, entries = found["sha"], found["siblings"]
        names = [str(entry["rfilename"]) for entry in entries]
        folder = parse_url(f"{endpoint}/{repo}/resolve/{urllib.parse.quote(commit, '')}")
    except RefusedError as error:
        kind = CheckpointNotFoundError if error.is_absent else CheckpointError
        text = f"not in the local hub cache, and the hub: {error}"
        if error.is_absent:
            text += " (no such model or revision, or a private one: set HF_TOKEN)"
        raise kind(text, path=name) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError("the hub's answer is not one of a hub", path=name) from error
    finally:
        site.close()
    return Site(folder, timeout_s, token=token, names=names)


def _token() -> str:
    """The user's token for the hub, if there is one."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable):
            return os.environ[variable].strip()
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _YES:
        return ""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    path = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    try:
        with open(os.path.expanduser(path), encoding="ascii") as file:
            return file.read(4096).strip()
    except (OSError, ValueError):
        return ""
