"""One torch thread in each worker, without changing what any other thread gets.

``torch.set_num_threads(1)`` acts on the calling thread and on threads started later. The workers
call it one by one under a lock, and the process-wide value is put back before the lock is
released, from the thread that held it.
"""

from __future__ import annotations

import os
import threading

import torch

_LOCK = threading.Lock()


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


# A child forked while another thread holds the lock would wait for it for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def use_one_torch_thread() -> None:
    """Make torch single-threaded in the calling thread only.

    Blocks are spread over workers already; a second layer of threads inside each copy makes them
    fight for the same cores.
    """
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        if before == 1:
            return
        # A helper thread restores the value for threads to come; its own setting dies with it.
        restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
        restorer.start()
        restorer.join()
