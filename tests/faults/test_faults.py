"""What goes wrong midway: the exception arrives unchanged, and everything is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import streamload
from streamload.sources import files
from tests.support.tiny import (
    assert_unchanged,
    bag,
    gpt2_tensors,
    meta_gpt2,
    open_descriptors,
    same_bits,
    state_of,
    write,
    write_gpt2,
)

COUNT = 24
TENSORS = {f"t{i:02d}.weight": torch.full((64, 64), float(i + 1)) for i in range(COUNT)}
SHAPES = dict.fromkeys(TENSORS, (64, 64))


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x.safetensors", TENSORS)


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = open_descriptors(), threading.active_count()
    yield
    assert (open_descriptors(), threading.active_count()) == before


def right(module):
    return all(same_bits(module.get_parameter(n), t) for n, t in TENSORS.items())


FAULTS = [
    MemoryError("no memory"),
    OSError(5, "Input/output error"),
    KeyboardInterrupt(),
    ValueError("x"),
]


def ids(fault):
    return type(fault).__name__


@pytest.mark.parametrize("fault", FAULTS, ids=ids)
@pytest.mark.parametrize("where", ["progress", "on_assign", "read", "allocate", "worker"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_meta_module_is_exactly_as_it_was(path, monkeypatch, fault, where, workers):
    module = bag(SHAPES)
    before = state_of(module)
    count = [0]
    options = {"workers": workers, "chunk_bytes": 4096}

    def fail(*_args, **_kwargs):
        count[0] += 1
        if count[0] >= 12:
            raise fault

    with monkeypatch.context() as patch:
        if where in ("progress", "on_assign"):
            options[where] = fail
        elif where == "read":
            inner = files.OpenFile.read_into

            def read(self, offset, buffer, *, tensor=None):
                if tensor is not None:
                    fail()
                inner(self, offset, buffer, tensor=tensor)

            patch.setattr(files.OpenFile, "read_into", read)
        elif where == "allocate":
            from streamload.engine.lanes.cpu import CpuLane

            allocate = CpuLane.allocate
            patch.setattr(CpuLane, "allocate", lambda *a: (fail(), allocate(*a))[1])
        else:
            from streamload.engine.lanes.cpu import CpuWorker

            carry = CpuWorker.carry
            patch.setattr(CpuWorker, "carry", lambda *a: (fail(), carry(*a))[1])
        if where == "progress":
            count[0] = 11  # it is called seldom when loads are this small
        with pytest.raises(type(fault)) as info:
            streamload.load_into(module, path, **options)
        assert info.value is fault
    assert_unchanged(module, before)
    del before
    assert streamload.load_into(module, path, workers=workers).ok, "a second load works"
    assert right(module)


@pytest.mark.parametrize("fault", FAULTS[:3], ids=ids)
@pytest.mark.parametrize("at", [1, 2, 14, 28, 29])
def test_assignments_are_taken_back_with_ties(tmp_path, fault, at):
    folder = write_gpt2(tmp_path)
    model = meta_gpt2()
    before = state_of(model)
    count = [0]

    def hook(stored, target):
        count[0] += 1
        if count[0] == at:
            raise fault

    if at > 28:
        streamload.load_into(model, folder, on_assign=hook)
        return
    with pytest.raises(type(fault)):
        streamload.load_into(model, folder, on_assign=hook)
    assert_unchanged(model, before)
    assert model.lm_head.weight is model.tok_embed.weight


def test_memory_comes_back_when_the_exception_is_dropped(tmp_path):
    import gc
    import weakref

    from streamload.engine.lanes.cpu import CpuLane

    path = write(tmp_path / "x.safetensors", TENSORS)
    made = []
    inner = CpuLane.allocate

    def allocate(self, planned):
        tensor = inner(self, planned)
        made.append(weakref.ref(tensor))
        return tensor

    patch = pytest.MonkeyPatch()
    patch.setattr(CpuLane, "allocate", allocate)
    try:
        with pytest.raises(ValueError, match="stop"):
            streamload.load_into(bag(SHAPES), path, on_assign=stop)
    finally:
        patch.undo()
    gc.collect()
    assert len(made) == COUNT
    assert not [ref for ref in made if ref() is not None]


def stop(*_):
    raise ValueError("stop")


class TestInPlace:
    """A failure midway says which tensors were already overwritten."""

    def fails(self, monkeypatch, fault, at=12):
        inner, count = files.OpenFile.read_into, [0]

        def read(self, offset, buffer, *, tensor=None):
            if tensor is not None:
                count[0] += 1
                if count[0] >= at:
                    raise fault
            inner(self, offset, buffer, tensor=tensor)

        monkeypatch.setattr(files.OpenFile, "read_into", read)

    @pytest.mark.parametrize(
        "fault",
        [
            MemoryError("no"),
            KeyboardInterrupt(),
            streamload.ReadError("broken", path="p", tensor="t"),
        ],
        ids=ids,
    )
    def test_the_names_are_told(self, path, monkeypatch, fault):
        module = bag(SHAPES, device="cpu")
        self.fails(monkeypatch, fault)
        with pytest.raises(type(fault)) as info:
            streamload.load_into(module, path, workers=1)
        names = list(TENSORS)
        assert info.value is fault
        assert info.value.overwritten == tuple(names[:12])
        text = str(info.value) + "".join(getattr(info.value, "__notes__", ()))
        assert "already overwritten, at least in part: 't00.weight', 't01.weight'" in text
        for at, name in enumerate(names):
            values = module.get_parameter(name)
            assert (values == at + 1).all() if at < 11 else (values == 0).all()

    def test_nothing_is_told_where_nothing_was_written(self, path, monkeypatch):
        module = bag(SHAPES, device="cpu")
        before = state_of(module)
        monkeypatch.setattr(files.OpenFile, "check_unchanged", lambda self: None)
        with pytest.raises(streamload.PlanError) as info:
            streamload.load_into(module, path, dtype="bfloat16")
        assert not hasattr(info.value, "overwritten")
        assert_unchanged(module, before)

    def test_a_hook_that_raises_finds_all_overwritten(self, path):
        module = bag(SHAPES, device="cpu")
        with pytest.raises(ValueError, match="stop") as info:
            streamload.load_into(module, path, on_assign=stop)
        assert set(info.value.overwritten) == set(TENSORS)
        assert right(module)


def child(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_real_interrupt_takes_everything_back(tmp_path):
    """SIGINT to the process, while workers read and later between two assignments."""
    folder = write_gpt2(tmp_path)
    code = """
        import os, signal, sys, threading
        sys.path.insert(0, os.getcwd())
        import streamload
        from streamload.sources import files
        from tests.support.tiny import assert_unchanged, meta_gpt2, open_descriptors, state_of

        model = meta_gpt2()
        before = state_of(model)
        opened = open_descriptors()
        inner = files.OpenFile.read_into
        count = [0]

        def read(self, offset, buffer, *, tensor=None):
            if tensor is not None:
                count[0] += 1
                if count[0] == 5:
                    os.kill(os.getpid(), signal.SIGINT)
            inner(self, offset, buffer, tensor=tensor)

        def assign(stored, target):
            count[0] += 1
            if count[0] == 9:
                os.kill(os.getpid(), signal.SIGINT)

        files.OpenFile.read_into = read
        for options in ({"workers": 2, "chunk_bytes": 64}, {"on_assign": assign}):
            try:
                streamload.load_into(model, sys.argv[1], **options)
                print("not interrupted")
            except KeyboardInterrupt:
                print("interrupted")
            assert_unchanged(model, before)
            assert open_descriptors() == opened
            assert threading.active_count() == 1
            files.OpenFile.read_into = inner
            count[0] = 0
        assert streamload.load_into(model, sys.argv[1]).ok
        print("loaded")
    """
    process = child(code, folder)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert out.split("\n")[:3] == ["interrupted", "interrupted", "loaded"]


def test_the_command_line_ends_with_130(tmp_path):
    folder = write_gpt2(tmp_path)
    os.unlink(os.path.join(folder, "config.json"))
    os.mkfifo(os.path.join(folder, "config.json"))
    process = child(
        """
        import os, signal, sys
        from streamload.sources import detect
        inner = detect.open_checkpoint
        def interrupted(path, **reach):
            os.kill(os.getpid(), signal.SIGINT)
            return inner(path, **reach)
        detect.open_checkpoint = interrupted
        sys.argv = ["streamload", "inspect", sys.argv[1]]
        from streamload.cli import main
        main()
        """,
        folder,
    )
    _, error = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), error
    assert "Traceback" not in error


def test_two_threads_into_one_module_give_one_complete_result(path):
    module = bag(SHAPES)
    threads = [threading.Thread(target=streamload.load_into, args=(module, path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right(module)


def test_a_child_forked_while_another_thread_starts_workers_can_load(path):
    from streamload.engine import threads

    with threads._LOCK:  # as another thread holds it at that moment
        process = os.fork()
        if process == 0:
            code = 1
            try:
                signal.alarm(60)
                code = 0 if len(streamload.load_state_dict(path, workers=2)) == COUNT else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_a_short_file_never_leaves_zeros(tmp_path):
    folder = write_gpt2(tmp_path)
    whole = os.path.getsize(f"{folder}/model.safetensors")
    for size in (whole - 1, whole // 2, 9):
        os.truncate(f"{folder}/model.safetensors", size)
        model = meta_gpt2()
        with pytest.raises(streamload.CheckpointError):
            streamload.load_into(model, folder)
        assert all(p.is_meta for p in model.parameters())
        write_gpt2(tmp_path, gpt2_tensors())
