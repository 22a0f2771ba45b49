"""What a command writes to a terminal, escapes and all."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence

import pytest


def on_a_terminal(arguments: Sequence[str], **environment: str) -> str:
    """Run Python with the arguments (``-c CODE``), or else the command line with them."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [] if arguments[0] == "-c" else ["-m", "streamload"]
    process = subprocess.Popen(
        [sys.executable, *command, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    os.close(theirs)
    data = b""
    while True:
        if not select.select([ours], [], [], 120)[0]:
            process.kill()
            break
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # Linux: the other end is closed
            break
        if not block:
            break
        data += block
    os.close(ours)
    process.wait()
    return data.decode("utf-8", "surrogateescape")
