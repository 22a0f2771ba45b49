"""The end of the process: at once, where everything that must be done before it is done.

An ordinary end frees every object of torch one by one and walks the model's memory, for half a
second in which whoever waits for the command waits for nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from streamload.cli.group import main


def run() -> NoReturn:
    """The command line as a process of its own; never returns."""
    code: object = 0
    try:
        main(prog_name="streamload")
    except SystemExit as end:
        code = end.code
    if _may_end_at_once(code):
        number = 0 if code is None else int(str(code))
        _end(number)
    raise SystemExit(code)


def _may_end_at_once(code: object) -> bool:
    """Not while others count on an ordinary end: a debugger, a profiler, threads, children."""
    if "torch" not in sys.modules or not (code is None or isinstance(code, int)):
        return False
    import multiprocessing  # torch has it already

    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    is_watched = sys.gettrace() is not None or sys.getprofile() is not None
    if monitoring is not None:
        is_watched = is_watched or any(monitoring.get_tool(at) is not None for at in range(6))
    threads = [t for t in threading.enumerate() if t is not threading.main_thread()]
    return not (
        is_watched
        or sys.flags.inspect
        or sys.flags.interactive
        or any(not thread.daemon for thread in threads)
        or multiprocessing.active_children()
    )


def _end(code: int) -> None:
    """End as an ordinary end would but for freeing memory; return if it would say something."""
    try:
        # What libraries and finalisers want to do last: temporary folders, coverage, logging.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except Exception:
        return  # a full disk, a closed pipe: Python says so in its own way, with its exit code
    os._exit(code)
