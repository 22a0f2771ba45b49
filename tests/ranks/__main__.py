"""Runs all scenarios of tests/ranks in one process that forks, and prints what came of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.ranks import forked
from tests.ranks.scenarios import everything

if __name__ == "__main__":
    forked.prepare()
    print(json.dumps(everything(Path(sys.argv[1]), sys.argv[2:])))
