"""Two processes, each the first of a PID namespace, that write to one place at random offsets.

``STREAMLOAD_ROUNDS`` sets how often; the default keeps the test short.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading

import pytest

from streamload.saving.cache.entries import read_entry, verify_entry
from streamload.synthesis import synthesize
from tests.reliability import record
from tests.support.loopback import Site, serve

ROUNDS = int(os.environ.get("STREAMLOAD_ROUNDS", "4"))
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
FILES = {"0": bytes(range(256)) * 800, "1": bytes(range(255, -1, -1)) * 900}


class Writer:
    def __init__(self):
        self.process = subprocess.Popen(
            [*NAMESPACE, sys.executable, "-m", "tests.support.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **task):
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def writers():
    try:
        made = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no unshare command")
    if made.returncode:
        pytest.skip("no PID namespace may be made here")
    pair = [Writer(), Writer()]
    try:
        assert [writer.answer()["process"] for writer in pair] == [1, 1]
        yield pair
    finally:
        for writer in pair:
            writer.close()


@pytest.fixture(scope="module")
def site():
    with serve(Site(FILES, etags={name: f'"{name}"' for name in FILES})) as running:
        running.pause_s = 0.001
        yield running


def final_files(folder):
    """Everything that readers see below a folder: path → digest of its content."""
    found = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".streamload-")]
        for name in names:
            if name.startswith(".streamload") or ".part" in name:
                continue
            try:
                with open(os.path.join(path, name), "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                continue  # replaced by a set of other names
            found[os.path.relpath(os.path.join(path, name), folder)] = hashlib.sha256(data).digest()
    return found


class Watch(threading.Thread):
    """Looks at the folder all the time; ``seen`` has every content of every final name."""

    def __init__(self, look):
        super().__init__(daemon=True)
        self.look, self.seen, self.is_over = look, set(), threading.Event()

    def run(self):
        while not self.is_over.wait(0.001):
            self.seen |= set(self.look())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.join()


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
@pytest.mark.parametrize(
    "operation",
    ["convert", "one_file", "sharded", "either", "export", "synth", "synth_raw", "download"],
)
def test_what_is_visible_is_one_writers_whole(tmp_path, writers, site, operation):
    common = {"operation": operation, "url": site.url}
    common["source"] = synthesize("gpt2-tiny", tmp_path / "source", masks=False).path
    whole = []
    for which, writer in enumerate(writers):
        target = str(tmp_path / f"alone{which}")
        os.makedirs(target)
        writer.ask(**common, target=target, which=which, delay_s=0)
        alone = writer.answer()
        assert not alone["error"]
        # An index also names the shards, which have other names where others are there.
        whole.append({d for n, d in final_files(target).items() if not n.endswith("index.json")})
        took_s = alone["end_s"] - alone["start_s"]
    assert whole[0] - whole[1]
    assert whole[1] - whole[0]
    for turn in range(ROUNDS):
        target = str(tmp_path / str(turn // 2))  # when nothing is there, and over what is
        with Watch(lambda target=target: final_files(target).items()) as watch:
            for which, writer in enumerate(writers):
                delay_s = random.uniform(0, took_s)
                writer.ask(**common, target=target, which=which, delay_s=delay_s)
            said = [writer.answer() for writer in writers]
        seen = {digest for name, digest in watch.seen if not name.endswith("index.json")}
        assert seen <= whole[0] | whole[1]
        told_truly(said, target, whole)
    leftovers = [n for n in os.listdir(tmp_path) if n.startswith(".streamload")]
    assert not leftovers
    record("writers in two namespaces", 2 * ROUNDS)


def told_truly(said, target, whole):
    """The folder is one writer's, the last one's, and each knows what became of its files."""
    files = final_files(target)
    left = {digest for name, digest in files.items() if not name.endswith("index.json")}
    if said[0].get("path") and os.path.exists(target):
        leftovers = [n for n in os.listdir(target) if n.startswith(".streamload")]
        assert not leftovers
    failed = [one["error"] for one in said if one["error"]]
    # Only a download is refused: there one part is filled by one process.
    assert all("another process is fetching" in error for error in failed), failed
    assert len(failed) < 2
    (winner,) = (which for which in (0, 1) if left == whole[which])
    if failed:
        assert not said[winner]["error"]
        return
    for which, one in enumerate(said):
        replaced = [n for n in one["notices"] if "replaced by another process" in n]
        assert not (replaced and which == winner)
    first = min((0, 1), key=lambda which: said[which]["end_s"])
    if said[first]["end_s"] < said[1 - first]["start_s"]:
        assert winner == 1 - first
    weights = {n for n in said[winner]["files"] if n.endswith((".safetensors", ".pt"))}
    there = {n for n in files if n.endswith((".safetensors", ".pt")) and "mp_rank" not in n}
    assert there == weights


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
def test_a_cache_entry_is_whole_whenever_it_is_seen(tmp_path, writers):
    source = synthesize("gpt2-tiny", tmp_path / "source", masks=False).path
    common = {"operation": "cached", "url": "", "source": source}

    def look(folder):
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in (n for n in names if not n.startswith(".")):
            yield from verify_entry(read_entry(os.path.join(folder, name)))

    for turn in range(ROUNDS):
        target = str(tmp_path / f"cache{turn // 2}")
        if turn % 2:  # damaged: both make it anew
            (name,) = [n for n in os.listdir(target) if not n.startswith(".")]
            os.truncate(os.path.join(target, name), 3000)
        with Watch(lambda t=target, turn=turn: () if turn % 2 else look(t)) as watch:
            for which, writer in enumerate(writers):
                delay_s = random.uniform(0, 0.3)
                writer.ask(**common, target=target, which=which, delay_s=delay_s)
            said = [writer.answer() for writer in writers]
        assert watch.seen == set()
        assert list(look(target)) == []
        notices = [" ".join(one["notices"]) for one in said]
        assert not any(one["error"] for one in said)
        assert len([n for n in os.listdir(target) if not n.startswith(".")]) == 1
        assert not [n for n in os.listdir(target) if n.endswith(".tmp")]
        assert sum("cache written: " in text for text in notices) == 1, notices
        others = ("cache written by another process", "loaded from cache")
        assert sum(any(o in text for o in others) for text in notices) == 1, notices
