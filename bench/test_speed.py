"""Seconds that were promised: ``pytest bench/test_speed.py --benchmark-only`` on a quiet machine.

The tests count reads and calls instead, which hold on a busy machine too. Without the option each
call here runs once and no limit is held.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamload
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.planning.build import build_plan
from streamload.planning.records import Targets, TargetSpec
from streamload.synthesis import synthesize
from streamload.system.peaks import PeakSampler

Best = Callable[..., float]


@pytest.fixture
def best(benchmark: Any, request: pytest.FixtureRequest) -> Best:
    """The seconds of the quickest of some calls."""

    def timed(call: Callable[[], Any], *, rounds: int = 5) -> float:
        is_measured = request.config.getoption("--benchmark-only")
        benchmark.pedantic(call, rounds=rounds if is_measured else 1)
        return float(benchmark.stats.stats.min) if is_measured else 0.0

    return timed


def command(*arguments: str, cache: Path | None = None) -> None:
    environment = None if cache is None else {"XDG_CACHE_HOME": str(cache), "PATH": ""}
    subprocess.run(
        [sys.executable, "-m", "streamload", *arguments],
        check=True,
        capture_output=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return synthesize("gpt2-tiny", tmp_path_factory.mktemp("speed") / "gpt2-tiny").path


def test_help(best: Best) -> None:
    assert best(lambda: command("--help")) < 0.25


def test_inspect(best: Best, tiny: str) -> None:
    assert best(lambda: command("inspect", tiny)) < 0.4


def test_demo(best: Best, tmp_path: Path) -> None:
    assert best(lambda: command("demo", cache=tmp_path), rounds=1) < 30


def test_a_sample_of_memory_costs_under_one_percent_of_its_interval(best: Best) -> None:
    with PeakSampler(interval_s=60) as sampler:

        def twenty() -> None:
            for _ in range(20):
                sampler._sample()

        assert best(twenty, rounds=20) / 20 < 0.01 * 0.01


def plan_of(count: int) -> Callable[[], None]:
    names = [f"h.{i // 10}.t{i % 10}.weight" for i in range(count)]
    stored = Catalog({n: TensorSpec(n, "F32", (2,), "f", Extent("f", 0, 8)) for n in names})
    targets = Targets(tuple(TargetSpec((n,), (2,), "F32", is_meta=True) for n in names))
    return lambda: build_plan(stored, None, targets).raise_if_refused()


def test_a_plan_of_20000_tensors(best: Best) -> None:
    assert best(plan_of(20_000), rounds=3) < 4.0


def test_opening_2000_tensors_of_a_torch_file(best: Best, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(2000)}, path)
    assert best(lambda: streamload.open_checkpoint(path).close()) < 2.0


def test_a_mapped_load_of_64_mib(best: Best, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({f"t{i}": torch.zeros(1024, 1024, 4) for i in range(4)}, path)
    assert best(lambda: streamload.load_state_dict(path, mode="map")) < 1.0
