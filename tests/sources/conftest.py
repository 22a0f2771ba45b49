"""Checkpoints that 1, 2 and 4 ranks wrote, once for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``tests.support.distcp_writer`` fills."""
    folder = tmp_path_factory.mktemp("distcp")
    command = [sys.executable, "-m", "tests.support.distcp_writer", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder
