"""The end of a command's process: at once, and yet nothing is lost that an ordinary end brings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.tiny import write_gpt2

# Something to do at exit, something that only the freeing of objects would say, and the command.
RUN = textwrap.dedent(
    """
    import atexit, sys, tempfile, threading
    class Told:
        def __del__(self, write=sys.stderr.write): write("freed|")
    told = Told()
    told.itself = told
    atexit.register(sys.stderr.write, "at exit|")
    kept = tempfile.TemporaryDirectory(prefix=sys.argv.pop(1))
    how = sys.argv.pop(1)
    if how == "thread":
        threading.Thread(target=threading.main_thread().join).start()
    if how == "profile":
        sys.setprofile(lambda *_: None)
    if how == "lost":
        atexit.register(sys.stdout.write, "unwritten")
    from streamload.cli.ending import run
    run()
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpt2(tmp_path_factory.mktemp("tiny"))


def run(tmp_path, how, *arguments, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "kept"), how, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("how", ["plain", "thread", "profile"])
def test_all_is_done_but_freeing(tmp_path, folder, how):
    done = run(tmp_path, how, "load", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loaded=")
    assert done.stderr.count("at exit|") == 1
    assert ("freed|" in done.stderr) == (how != "plain")
    assert not list(tmp_path.iterdir())  # the temporary folder went


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("load", "absent"), 1),
        (("load", "{folder}", "--dtype", "float1"), 2),
        (("load", "{folder}", "--prefix", "nothing"), 1),
        (("generate", "{folder}", "--tokens", "999"), 1),
        (("--help",), 0),
    ],
)
def test_exit_codes_stay(tmp_path, folder, arguments, code):
    done = run(tmp_path, "plain", *(one.format(folder=folder) for one in arguments))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_no_success(tmp_path, folder):
    with open("/dev/full", "w") as full:
        done = run(tmp_path, "lost", "--version", stdout=full)
        assert done.returncode != 0
        done = run(tmp_path, "lost", "load", folder, stdout=full)
    assert done.returncode != 0
    assert "No space left" in done.stderr


def test_a_reader_that_went_away(tmp_path, folder):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        done = run(tmp_path, "plain", "load", folder, stdout=broken)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
