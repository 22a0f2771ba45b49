"""A memory control group for one measured process, where this machine allows to make one."""

from __future__ import annotations

import contextlib
import os
import time

from streamload.system.cgroups import Cgroup, cgroups


class Group(Cgroup):
    """A group made for one process; ``remove`` it afterwards."""

    def remove(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
                return
            time.sleep(0.02)  # a process that just ended is still counted for a moment


def make_group(name: str, limit_bytes: int | None) -> Group | str:
    """A new group below one that this process is in, or the reason why there is none."""
    reason = "this process is in no memory control group"
    for above in cgroups("/"):
        folder = os.path.join(above.folder, name)
        group = Group(folder, above.limit, above.usage, above.peak, above.reclaimable)
        if not os.access(os.path.join(above.folder, "cgroup.procs"), os.W_OK):
            reason = "no process may be moved to another control group here"
            continue
        try:
            os.mkdir(folder)
        except OSError as error:
            reason = f"no control group can be made here ({error.strerror})"
            continue
        try:
            if group.number(group.usage) is not None:
                if limit_bytes is not None:
                    _limit(group, limit_bytes)
                return group
            reason = "the memory controller is not enabled for new control groups"
        except OSError as error:
            reason = f"no limit can be set here ({error.strerror})"
        os.rmdir(folder)
    return reason


def _limit(group: Cgroup, limit_bytes: int) -> None:
    """Set the limit, and keep swap from hiding it where swap is counted."""
    values = {
        group.limit: limit_bytes, "memory.swap.max": 0, "memory.memsw.limit_in_bytes": limit_bytes
    }  # fmt: skip
    for name, value in values.items():
        path = os.path.join(group.folder, name)
        if name == group.limit or os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(value))
