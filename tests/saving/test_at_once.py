"""Several processes that write to one place at once: all succeed, and the result is whole."""

import multiprocessing
import os
import sys

import pytest
import torch

import streamload
from streamload.synthesis import synthesize

PROCESSES, ROUNDS = 4, 10

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


def convert(source, target, number, **options):
    streamload.convert(source, target, **options)


def differently(source, target, number):
    streamload.convert(
        source,
        target,
        names=("local", "published")[number % 2],
        dtype=("float16", None)[number // 2],
    )


def export(source, target, number):
    streamload.export(streamload.load(source).model, target)


def cached(source, target, number):
    os.environ["STREAMLOAD_CACHE"] = target
    notices = streamload.load(source, dtype="bfloat16", cache=True).report.notices
    assert not any("not written" in n or "damaged" in n for n in notices), notices


def sharded(source, target, number):
    streamload.convert(source, target, max_shard_bytes=60_000)


def one_file(source, target, number):
    streamload.convert(source, f"{target}.safetensors")


def work(task, source, folder, number, barrier, problems):
    torch.set_num_threads(1)
    for turn in range(ROUNDS):
        barrier.wait(120)
        # Each place is written twice: when nothing is there, and over what is.
        try:
            task(source, os.path.join(folder, str(turn // 2)), number)
        except BaseException as error:
            problems.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("task", [convert, sharded, one_file, differently, export, cached])
def test_all_succeed(tmp_path, task):
    source = synthesize("gpt2-tiny", tmp_path / "source").path
    (tmp_path / "out").mkdir()
    fork = multiprocessing.get_context("fork")
    barrier, problems = fork.Barrier(PROCESSES), fork.SimpleQueue()
    arguments = (task, source, str(tmp_path / "out"))
    processes = [
        fork.Process(target=work, args=(*arguments, number, barrier, problems), daemon=True)
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    found = []
    while not problems.empty():
        found.append(problems.get())
    assert found == []
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    for name in os.listdir(tmp_path / "out"):
        path = tmp_path / "out" / name
        assert not [n for n in os.listdir(tmp_path / "out") if n.endswith(".tmp")]
        if path.is_dir() and task is not cached:
            assert streamload.load(path).report.ok
            assert not [n for n in os.listdir(path) if n.endswith(".tmp")]
