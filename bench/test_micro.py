"""The parts of a load, one at a time: ``pytest bench --benchmark-only``.

As plain tests they run once or a few times and check what they compute. ``extra_info`` has the
bytes that were moved and the peak memory of one call over its start.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamload
from bench.checkpoints import many_tensors
from bench.job import Job
from streamload.loading.calls import plan_checkpoint
from streamload.measuring.own_peers import MODES
from streamload.synthesis import synthesize
from streamload.system.peaks import PeakSampler, StatusReader

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_DIR", str(tmp_path_factory.mktemp("micro")))
        yield


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with one float32 matrix of 8 MiB."""
    path = str(tmp_path_factory.mktemp("matrix") / "one.safetensors")
    save_file({"w": torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))}, path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 of a few megabytes."""
    folder = str(tmp_path_factory.mktemp("small") / "gpt2")
    synthesize("gpt2-stub", folder, layers=4)
    return folder


Run = Callable[..., Any]


@pytest.fixture
def run(benchmark: Any) -> Run:
    """Times a call, notes its bytes and its peak memory, and returns what it returned."""

    def timed(call: Callable[[], Any], *, nbytes: int = 0, rounds: int = 5) -> Any:
        with PeakSampler(interval_s=0.001) as sampler:
            result = call()
        benchmark.extra_info["peak_rss_bytes"] = sampler.peaks.rss_bytes
        benchmark.extra_info["peak_anonymous_bytes"] = sampler.peaks.anonymous_bytes
        benchmark.extra_info["nbytes"] = nbytes
        benchmark.pedantic(call, rounds=rounds, warmup_rounds=1)
        return result

    return timed


def test_memory_sample(run: Run) -> None:
    with StatusReader(os.getpid()) as status:
        assert run(status.read, rounds=1000).rss > 0


def test_header_parsing(run: Run) -> None:
    path = many_tensors(5000)

    def call() -> int:
        with streamload.open_checkpoint(path) as source:
            return len(source.catalog)

    assert run(call, nbytes=os.path.getsize(path) - 5000 * 256) == 5000


def test_planning(run: Run, small: str) -> None:
    made = run(lambda: plan_checkpoint(small, dtype="bfloat16"))
    assert made.ok
    assert len(made.report.loaded) == 4 * 12 + 4


def test_block_read(run: Run, matrix: str) -> None:
    buffer = bytearray(4 * MIB)
    with streamload.open_checkpoint(matrix) as source:
        extent = source.catalog["w"].extent
        assert extent is not None
        block = type(extent)(extent.file, extent.offset, len(buffer))
        run(lambda: source.read_into(block, memoryview(buffer)), nbytes=len(buffer), rounds=20)
    assert Path(matrix).read_bytes()[-8 * MIB :].startswith(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_and_cast(run: Run, matrix: str, dtype: torch.dtype) -> None:
    loaded = run(lambda: streamload.load_state_dict(matrix, dtype=dtype), nbytes=8 * MIB)
    assert torch.equal(loaded["w"], load_file(matrix)["w"].to(dtype))


def test_transposed_copy(run: Run, matrix: str) -> None:
    turned = streamload.NameMap((streamload.Rule("w", "w", streamload.Transpose()),))
    loaded = run(
        lambda: streamload.load_state_dict(matrix, dtype="bfloat16", mapping=turned),
        nbytes=8 * MIB,
    )
    assert loaded["w"].is_contiguous()
    assert torch.equal(loaded["w"], load_file(matrix)["w"].bfloat16().t())


@pytest.mark.parametrize("mode", MODES)
def test_small_load(run: Run, small: str, mode: str) -> None:
    path, job = Path(small) / "model.safetensors", Job(small, None, workers=2)
    loaded = run(lambda: MODES[mode].load(job), nbytes=path.stat().st_size)
    assert loaded.report.mode == ("map" if mode == "map" else "stream")
    assert not loaded.report.missing
