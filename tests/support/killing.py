"""Kills an operation at random moments and checks what it left; run as a script by test_killed.

``python -m tests.support.killing OPERATION FOLDER KILLS [URL]``. Torch is imported once; each try
and each check is a fork of a process that has no threads.
"""

import os
import random
import signal
import sys
import time

import torch

import streamload
from streamload import models  # noqa: F401 imported here, not in every fork
from streamload.downloading.fetching import fetch
from streamload.loading import calls  # noqa: F401
from streamload.mapping.tables import registry  # noqa: F401
from streamload.models import gpt  # noqa: F401
from streamload.saving import converting, exporting  # noqa: F401
from streamload.saving.cache.entries import list_cache, verify_entry

SHARDED = {"max_shard_bytes": 400_000}


def stored(path):
    return streamload.load_state_dict(path, mapping=lambda name: name)


class Convert:
    """Between one file and shards, float32 and bfloat16: each run replaces the one before."""

    def __init__(self, folder, url):
        del url
        self.source = os.path.join(folder, "source")
        self.target = os.path.join(folder, "target")

    def run(self, turn):
        dtype = ("bfloat16", "float32")[turn % 2]
        options = SHARDED if turn % 3 else {}
        streamload.convert(self.source, self.target, dtype=dtype, **options)

    def check(self, *, is_done):
        found = stored(self.target)
        whole = {n: t for n, t in stored(self.source).items() if not n.endswith(".attn.bias")}
        assert found.keys() == whole.keys()
        (dtype,) = {tensor.dtype for tensor in found.values()}
        assert all(torch.equal(found[name], t.to(dtype)) for name, t in whole.items())
        odd = [n for n in os.listdir(self.target) if n.startswith(".")]
        assert not (is_done and odd), odd
        beside = [n for n in os.listdir(os.path.dirname(self.target)) if n.startswith(".")]
        assert not (is_done and beside), beside


class Export(Convert):
    def run(self, turn):
        model = streamload.load(self.source, dtype=("bfloat16", "float32")[turn % 2]).model
        streamload.export(model, self.target, **(SHARDED if turn % 3 else {}))


class Cache(Convert):
    """A cache that is always new: what a kill leaves must not be taken for an entry."""

    def run(self, turn):
        del turn
        for entry in list_cache():
            os.unlink(entry.path)
        streamload.load(self.source, dtype="bfloat16", cache=True)

    def check(self, *, is_done):
        folder = os.environ["STREAMLOAD_CACHE"]
        names = os.listdir(folder) if os.path.isdir(folder) else []
        final = [n for n in names if not n.startswith(".")]
        temporary = [n for n in names if n.endswith(".tmp")]
        assert not (is_done and (len(final) != 1 or temporary)), names
        assert len(final) <= 1
        for entry in list_cache():
            assert verify_entry(entry) == []
        if is_done:
            cached = streamload.load(self.source, dtype="bfloat16", cache=True)
            assert cached.report.mode == "map"
            plain = streamload.load(self.source, dtype="bfloat16").model.state_dict()
            for name, tensor in cached.model.state_dict().items():
                assert torch.equal(tensor, plain[name])


class Download:
    """Each run begins without the file, but with what the killed one had of it."""

    def __init__(self, folder, url):
        self.path = os.path.join(folder, "x.pt")
        self.url = url

    def run(self, turn):
        if turn % 3 == 0 and os.path.exists(self.path):
            os.unlink(self.path)
        fetch(f"{self.url}/x.pt", self.path, pause_s=0.01)

    def check(self, *, is_done):
        if os.path.exists(self.path):
            with open(self.path, "rb") as file:
                assert file.read() == bytes(range(256)) * 4000
        assert not is_done or os.listdir(os.path.dirname(self.path)) == ["x.pt"]


OPERATIONS = {"convert": Convert, "export": Export, "cache": Cache, "download": Download}


def forked(work):
    """Start ``work`` in a fork; its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def finished(work):
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])


def main(name, folder, kills, url=""):
    operation = OPERATIONS[name](folder, url)
    start_s = time.monotonic()
    assert finished(lambda: operation.run(0)) == 0
    took_s = time.monotonic() - start_s
    killed = 0
    for turn in range(1, int(kills) + 1):
        process = forked(lambda turn=turn: operation.run(turn))
        time.sleep(random.uniform(0, took_s * 1.1))
        os.kill(process, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0
        assert finished(lambda: operation.check(is_done=False)) == 0, turn
        if turn % 2:  # the next kill may also meet what this one left
            assert finished(lambda turn=turn: operation.run(turn + 1)) == 0, turn
            assert finished(lambda: operation.check(is_done=True)) == 0, turn
    assert finished(lambda: operation.run(1)) == 0
    assert finished(lambda: operation.check(is_done=True)) == 0
    print(f"{name}: {killed} of {kills} runs killed, {took_s:.3f} s each")


if __name__ == "__main__":
    main(*sys.argv[1:])
