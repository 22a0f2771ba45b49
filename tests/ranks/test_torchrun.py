"""``--shard`` as users start it: by torchrun, whose ranks are processes that know nothing more."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamload.synthesis import synthesize

pytest.importorskip("torch.distributed.run")


def torchrun(*arguments, cwd):
    order = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(order, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_page_runs(tmp_path):
    synthesize("llama-tiny", tmp_path / "llama-tiny")
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "shard.py").write_text(script)
    lines = torchrun("shard.py", cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["rank 0", "rank 1", "2 ranks"]


def test_the_first_rank_reports_what_every_rank_read(tmp_path):
    path = synthesize("llama-tiny", tmp_path / "llama").path
    arguments = ["-m", "streamload", "load", str(path), "--shard", "fsdp", "--json"]
    lines = torchrun(*arguments, cwd=tmp_path).splitlines()
    (report,) = [json.loads(line) for line in lines if line.startswith("{")]
    held = [rank["bytes_held"] for rank in report["ranks"]]
    assert len(held) == 2
    assert held[0] == held[1] == report["bytes_written"]
    assert all(rank["peak_rss_bytes"] >= 0 and rank["bytes_read"] for rank in report["ranks"])
