"""Twenty-five thousand mutated files: exact values of an independent reading, or an error of ours.

``python -m tests.fuzz.run SEED COUNT FOLDER`` runs other seeds and keeps what fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import streamload
from tests.fuzz import seeds
from tests.fuzz.bombs import BOMBS
from tests.fuzz.judge import LIMIT_S, judged
from tests.fuzz.run import KINDS, makers
from tests.reliability import record

FILES = 25_000
PROCESSES = 2


@pytest.fixture(scope="module")
def runs() -> list[dict[str, object]]:
    """In processes of their own: a crash costs the process, and shows."""
    command = [sys.executable, "-m", "tests.fuzz.run"]
    started = [
        subprocess.Popen(
            [*command, str(seed), str(FILES // PROCESSES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for seed in range(1, PROCESSES + 1)
    ]
    found = []
    for process in started:
        out, error = process.communicate(timeout=280)
        assert out, f"exit code {process.returncode}: {error[-2000:]}"
        found.append(json.loads(out))
    return found


def test_every_file_gives_exact_values_or_our_error(runs):
    failures = [line for run in runs for line in run["failures"]]
    assert not failures, "\n".join(failures[:20])
    for kind in KINDS:
        counts: Counter[str] = Counter()
        for run in runs:
            counts.update(run["verdicts"][kind])
        assert counts["same"] > 50
        assert counts["both refuse"] > 50
        record(f"mutated files: {kind}", sum(counts.values()))


@pytest.fixture(scope="module")
def bombs() -> dict[str, dict[str, object]]:
    """In a process of its own, whose memory is held to the limit of each file."""
    command = [sys.executable, "-m", "tests.fuzz.bombs"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


@pytest.mark.parametrize("title", BOMBS)
def test_a_small_file_never_stands_for_a_large_one(bombs, title):
    found = bombs[title]
    assert not found["said"].startswith("foreign"), found
    assert found["elapsed_s"] < found["limit_s"], found


def test_none_takes_long(runs):
    """Memory is held to its limit while the files are read."""
    assert max(run["slowest_s"] for run in runs) < LIMIT_S


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_seed(tmp_path_factory, kind, seed):
    _, name, reference = KINDS[kind]
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    for shard, tensors in seeds.SHARDS.items():
        if not (folder / shard).exists():
            save_file(tensors, folder / shard)
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(makers(kind)(Random(seed)))
    with warnings.catch_warnings():
        # torch.load warns about some damaged files; that is the reference's own affair.
        warnings.simplefilter("ignore")
        verdict = judged(str(path), reference)
    assert not verdict.is_failure, verdict


EXTRA = {
    "deep": "[" * 130 + "]" * 130,
    "infinite": "1e999",
    "a number of 400 digits": "9" * 400,
    "half a character": '"\\ud800"',
}


@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
def test_unknown_fields_are_left_out_but_must_be_json_for_everyone(tmp_path, extra):
    def written(value):
        text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":%s}}' % value.encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\7")
        return path

    with pytest.raises(streamload.CheckpointError, match=r"'w'|nested"):
        streamload.load_state_dict(written(extra))
    assert streamload.load_state_dict(written('["fine", 1e300]'))["w"].item() == 7


@pytest.mark.parametrize("shape", ["[0,4611686018427387904,8]", "[9223372036854775808,0]"])
def test_an_empty_shape_that_torch_cannot_hold(tmp_path, shape):
    text = b'{"w":{"dtype":"U8","shape":%s,"data_offsets":[0,0]}}' % shape.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(streamload.CheckpointError, match="more elements than there can be"):
        streamload.load_state_dict(path)


def test_many_dimensions(tmp_path):
    save_file({"w": torch.ones([1] * 70)}, tmp_path / "x.safetensors")
    try:
        found = streamload.load_state_dict(tmp_path / "x.safetensors")
    except streamload.StreamloadError:
        return
    assert found["w"].dim() == 70
