"""A web server on loopback with tiny checkpoints, and no proxy on the way to it."""

from __future__ import annotations

import os

import pytest

from tests.support.loopback import Site, serve


def tree(folder, start=""):
    """The files below a folder, as the server has them."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with open(path, "rb") as file:
                found[start + os.path.relpath(path, folder).replace(os.sep, "/")] = file.read()
    return found


@pytest.fixture
def site():
    with serve(Site()) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_of_the_users(monkeypatch):
    """Neither proxies nor tokens nor credentials of whoever runs the tests."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_")):
            monkeypatch.delenv(name)
