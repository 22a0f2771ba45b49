"""SIGKILL at random moments: old files stay whole, nothing half is under a final name.

``STREAMLOAD_KILLS`` sets how many; the default keeps the test short.
"""

import os
import subprocess
import sys

import pytest

from streamload.synthesis import synthesize
from tests.support.loopback import Site, serve

KILLS = os.environ.get("STREAMLOAD_KILLS", "6")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def kill(operation, folder, *more):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.killing", operation, str(folder), KILLS, *more]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "STREAMLOAD_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("operation", ["convert", "export", "cache"])
def test_writing(operation, tmp_path):
    synthesize("gpt2-tiny", tmp_path / "work" / "source", masks=False)
    kill(operation, tmp_path / "work")


def test_download(tmp_path):
    with serve(Site({"x.pt": bytes(range(256)) * 4000}, etags={"x.pt": '"v"'})) as site:
        site.pause_s = 0.002
        kill("download", tmp_path / "work", site.url)
