"""Time since the process began, imports included."""

from __future__ import annotations

import os
import time


def seconds_since_start() -> float:
    """Seconds since this process was started, to about a hundredth."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        try:
            with open("/proc/self/stat", "rb") as file:
                # proc(5): the command, which may hold blanks, ends at the last bracket; the
                # start time is the 22nd field, in ticks since boot.
                ticks = int(file.read().rpartition(b")")[2].split()[19])
            return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            pass  # no /proc here: psutil knows other ways, less exact ones
    import psutil

    return float(time.time() - psutil.Process().create_time())
