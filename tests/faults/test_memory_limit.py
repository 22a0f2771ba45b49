"""Loads inside a memory control group: what fits is loaded, the rest refused with a way out.

Needs the right to make control groups (root); skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from streamload.measuring.control_group import Group, make_group

MIB = 1 << 20
# What a Python process with torch takes before it loads anything, its libraries' pages included.
PROCESS_BYTES = 700 * MIB


@pytest.fixture
def group(request):
    made: list[Group] = []

    def make(limit_bytes: int) -> Group:
        found = make_group(f"streamload-test-{os.getpid()}-{len(made)}", limit_bytes)
        if isinstance(found, str):
            pytest.skip(found)
        made.append(found)
        return found

    yield make
    for one in made:
        one.remove()


def run_in(group: Group, *command: str) -> subprocess.CompletedProcess[str]:
    enter = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", enter, "sh", *command],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "2"},
    )


def make_cold(path: str) -> None:
    """Bring the file to the disk, and its pages out of the cache: they are charged anew."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


LOAD = textwrap.dedent(
    """
    import json, sys, threading, torch, streamload
    from streamload.system.cgroups import cgroups
    streamload.load_state_dict(sys.argv[2])  # imports
    group = next(g for g in cgroups("/") if g.number(g.usage) is not None)
    used, ended = [group.number(group.usage)], threading.Event()
    def watch():
        while not ended.wait(0.002):
            used.append(group.number(group.usage))
    watcher = threading.Thread(target=watch)
    watcher.start()
    found = streamload.load_state_dict(sys.argv[1], dtype="bfloat16")
    used.append(group.number(group.usage))
    ended.set()
    watcher.join()
    right = all(bool((t == int(n) + 1).all()) for n, t in found.items())
    print(json.dumps({"right": right, "peak": max(used) - used[0]}))
    """
)


def test_the_page_cache_is_given_back_when_the_limit_binds(tmp_path, group):
    tensors = {str(i): torch.full((8, 1 << 20), float(i + 1)) for i in range(6)}
    path, small = str(tmp_path / "x.safetensors"), str(tmp_path / "small.safetensors")
    save_file(tensors, path)
    save_file({"0": torch.ones(2)}, small)
    make_cold(path)
    model_bytes = sum(t.numel() for t in tensors.values()) * 2
    # Room for the model and what it may take beside it, but not for the file's pages as well.
    first = group(PROCESS_BYTES * 2)
    taken = json.loads(run_in(first, sys.executable, "-c", LOAD, small, small).stdout)
    assert taken["right"]
    started = first.number(first.peak)
    limited = group(started + model_bytes + 170 * MIB)
    result = run_in(limited, sys.executable, "-c", LOAD, path, small)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["right"]
    assert found["peak"] <= model_bytes + max(model_bytes // 10, 128 * MIB)


def test_generate_with_little_more_than_the_model(tmp_path, group):
    folder = str(tmp_path / "model")
    command = [sys.executable, "-m", "streamload"]
    subprocess.run(
        [*command, "synth", "gpt2", folder, "--layers", "2", "--no-masks"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    path = next(os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".safetensors"))
    make_cold(path)
    limited = group(os.path.getsize(path) // 2 + PROCESS_BYTES)
    result = run_in(
        limited, *command, "generate", folder, "--tokens", "1,2,3", "--max-new-tokens", "2",
        "--dtype", "bfloat16", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["tokens"]) >= 2


@pytest.mark.parametrize("asked", [(), ("--dtype", "bfloat16")])
def test_what_does_not_fit_is_refused_before_it_starts(tmp_path, group, asked):
    """4 GiB of nothing: the file is sparse, no byte of it is ever written or read."""
    path = str(tmp_path / "huge.safetensors")
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 4 << 30]}}
    ).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (4 << 30))
    limited = group(PROCESS_BYTES)
    code = (
        "import sys, streamload\n"
        "try: streamload.load_state_dict(sys.argv[1], dtype=sys.argv[2] or None)\n"
        "except streamload.MemoryBudgetError as e: print(e.limit, e.needed_bytes, e)\n"
    )
    result = run_in(limited, sys.executable, "-c", code, path, asked[-1] if asked else "")
    assert result.returncode == 0, result.stderr
    limit, needed, text = result.stdout.split(" ", 2)
    assert limit == "cgroup"
    assert int(needed) >= (2 if asked else 4) << 30
    assert "huge.safetensors" in text
    assert "mode='map'" in text
    assert ("convert" in text) == bool(asked)  # a copy, where the file itself cannot be mapped
    assert limited.number(limited.usage) < PROCESS_BYTES


def test_the_command_line_says_so_with_exit_code_3(tmp_path, group):
    folder = str(tmp_path / "neox")
    command = [sys.executable, "-m", "streamload"]
    sparse = ("neox-20b-raw", folder, "--sparse", "--layers", "4")
    subprocess.run([*command, "synth", *sparse], check=True, capture_output=True, timeout=120)
    result = run_in(group(PROCESS_BYTES), *command, "load", folder)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert "bfloat16" in result.stderr or "mode" in result.stderr


def test_a_model_larger_than_its_limit_generates_what_it_does_without_one(tmp_path, group):
    folder = str(tmp_path / "model")
    command = [sys.executable, "-m", "streamload"]
    made = ("synth", "gpt2", folder, "--layers", "16", "--no-masks")
    subprocess.run([*command, *made], check=True, capture_output=True, timeout=120)
    path = os.path.join(folder, "model.safetensors")
    asked = ("--tokens", "1,2,3", "--max-new-tokens", "3", "--json")
    found = []
    small_bytes = PROCESS_BYTES + 100 * MIB
    for limit_bytes in (small_bytes, 8 * PROCESS_BYTES):
        make_cold(path)
        result = run_in(group(limit_bytes), *command, "generate", folder, *asked)
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout))
    small, large = found
    assert small["tokens"] == large["tokens"]
    memory = small["load"]["memory"]
    assert 0 < memory["streamed_bytes"] < os.path.getsize(path)
    assert 0 < memory["resident_blocks"] < memory["blocks"] == 16
    assert large["load"]["memory"]["blocks"] == 0
    planned = run_in(group(small_bytes), *command, "plan", folder)
    assert planned.returncode == 0, planned.stderr
    assert "larger than memory" in planned.stdout
