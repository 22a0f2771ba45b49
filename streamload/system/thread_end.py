"""Ending threads that an interrupt may have met at their start."""

from __future__ import annotations

import threading
import time

_START_S = 1.0


def end_thread(thread: threading.Thread) -> None:
    """Wait until a thread has ended whose ``start`` may have been interrupted.

    An interrupt inside ``start`` leaves open whether the thread runs; if it does, it says so soon.
    """
    deadline_s = time.monotonic() + _START_S
    while thread.ident is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    if thread.ident is not None:
        thread.join()
