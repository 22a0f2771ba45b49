"""Ranks as forked processes: torch and transformers are imported once, whatever is run."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# scenario(rank, world, folder) -> what is known of it, as JSON has it.
Scenario = Callable[[int, int, Path], Any]


def run(scenario: Scenario, world: int, folder: Path, *, limit_s: float = 60) -> dict[int, Any]:
    """Run a scenario on ``world`` ranks; what each returned or raised, by rank.

    A rank that did not end by itself within ``limit_s`` is ``"hung"``, one that was killed is
    ``"killed"``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] if scenario.__name__.startswith("tcp") else 0
    children = {}
    for rank in range(world):
        children[rank] = os.fork() or _child(scenario, rank, world, folder, port)
    found: dict[int, Any] = {}
    end_s = time.monotonic() + limit_s
    for rank, pid in children.items():
        status = 0
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done or time.monotonic() > end_s:
                break
            time.sleep(0.01)
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found[rank] = "hung"
        elif os.WIFSIGNALED(status):
            found[rank] = "killed"
        else:
            found[rank] = json.loads((folder / f"{rank}.json").read_text())
    return found


def _child(scenario: Scenario, rank: int, world: int, folder: Path, port: int) -> int:
    code = 1
    try:
        store: Any = dist.FileStore(str(folder / "store"), world)
        if port:
            store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        start_s = time.monotonic()
        try:
            said = scenario(rank, world, folder)
        except BaseException as error:
            said = {"type": type(error).__name__, "error": str(error)}
            said["ranks"] = list(getattr(error, "ranks", ()))
        if isinstance(said, dict):
            said["elapsed_s"] = time.monotonic() - start_s
        (folder / f"{rank}.json").write_text(json.dumps(said))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare() -> None:
    """No threads of torch's own, which a fork would leave behind."""
    torch.set_num_threads(1)
