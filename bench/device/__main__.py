"""One check, in this process: its rows as JSON lines on stdout."""

import json
import sys
from dataclasses import asdict

from bench.device.machine import Cuda
from bench.device.rows import Sizes
from bench.device.running import CHECKS, run_one


def main(name: str, given: str) -> None:
    values = json.loads(given)
    sizes = Sizes(**{**values, "workers": tuple(values["workers"])})
    check = next(check for check in CHECKS if check.name == name)
    for row in run_one(check, Cuda(), sizes):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
