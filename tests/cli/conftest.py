"""A small checkpoint, and the command line in this process or in one of its own."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from streamload.cli import main
from streamload.synthesis import synthesize


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with GPT-2 in tiny: 2 blocks, width 64, 320 tokens, 64 positions."""
    return synthesize("gpt2-tiny", tmp_path_factory.mktemp("tiny") / "gpt2-tiny").path


@pytest.fixture
def run():
    """Run the command line here; stdout and stderr are apart."""

    def call(*args):
        return CliRunner().invoke(main, [str(arg) for arg in args])

    return call


@pytest.fixture
def spawn(tmp_path):
    """Run the command line as users do, in a process of its own."""

    def call(*args, env=(), **options):
        done = subprocess.run(
            [sys.executable, "-m", "streamload", *map(str, args)],
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **dict(env)},
            **options,
        )
        if "No module named 'torch'" in done.stderr:
            pytest.skip("needs torch")
        return done

    return call
