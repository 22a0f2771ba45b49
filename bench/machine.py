"""What the figures depend on: machine, versions, commit."""

import contextlib
import datetime
import os
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from streamload.measuring.machine import describe
from streamload.measuring.peers import Peer


def head_line(
    command: str, path: str, peers: Iterable[Peer], *, name: str | None = None, **asked: Any
) -> dict[str, Any]:
    """The first line of a file of results: what is asked for, machine, versions and commit."""
    packages = {name.split(".")[0] for peer in peers for name in peer.imported}
    versions = {}
    for package in sorted(packages | {"torch", "safetensors", "numpy"}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package.replace("_", "-"))
    return {
        "kind": "run",
        "command": command,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "path": name or os.path.basename(os.path.abspath(path)),
        **asked,
        "machine": {**describe(path), "commit": _commit()},
        "versions": versions,
    }


def _commit() -> str | None:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=os.path.dirname(__file__), capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
