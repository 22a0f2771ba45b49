"""How much memory is left, against planted files of the kernel."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamload.system.cgroups import cgroups
from streamload.system.memory import AvailableMemory, available_memory

MIB = 1 << 20


NONE_V1 = 9223372036854771712


class Tree:
    """A folder that looks like the /proc and control groups of a machine with 8 GiB free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n")
        self.write("proc/self/status", "Name:\tx\nVmSize:\t  1024 kB\n")

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def process(self, *groups: str) -> None:
        self.write("proc/self/cgroup", "\n".join(groups))

    def mounts(self, *mounts: tuple[str, str, str, str]) -> None:
        lines = [
            f"{i} 1 0:{i} {root} {point} rw,relatime shared:{i} - {kind} cg {options}"
            for i, (root, point, kind, options) in enumerate(mounts, 30)
        ]
        self.write("proc/self/mountinfo", "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda rw", *lines]))

    def v1(self, folder: str, limit: int, used: int = 0, **stat: int) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self._stat(folder, stat)

    def v2(self, folder: str, limit: object, used: int = 0, **stat: int) -> None:
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", used)
        self._stat(folder, stat)

    def _stat(self, folder: str, stat: dict[str, int]) -> None:
        self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def available(self) -> AvailableMemory:
        return available_memory(root=str(self.root))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


V1_MOUNT = ("/", "/sys/fs/cgroup/memory", "cgroup", "rw,memory")
V2_MOUNT = ("/", "/sys/fs/cgroup", "cgroup2", "rw")


def test_machine_alone_binds_where_there_are_no_groups(tree: Tree) -> None:
    assert tree.available() == AvailableMemory(8 << 30, "machine")


def test_v2_limit_binds_and_droppable_file_pages_are_free(tree: Tree) -> None:
    tree.process("0::/user/job")
    tree.mounts(V2_MOUNT)
    tree.v2(
        "sys/fs/cgroup/user/job", 1000 * MIB, 900 * MIB,
        file=700 * MIB, inactive_file=500 * MIB, active_file=100 * MIB, shmem=100 * MIB,
    )  # fmt: skip
    assert tree.available() == AvailableMemory(700 * MIB, "cgroup")


def test_v1_counts_the_pages_of_the_whole_subtree(tree: Tree) -> None:
    tree.process("9:cpu,cpuacct:/elsewhere", "4:memory:/job", "0::/ignored")
    tree.mounts(("/", "/sys/fs/cgroup/cpu", "cgroup", "rw,cpu"), V1_MOUNT)
    tree.v1(
        "sys/fs/cgroup/memory/job", 1000 * MIB, 600 * MIB,
        inactive_file=1, active_file=1,
        total_inactive_file=200 * MIB, total_active_file=50 * MIB,
    )  # fmt: skip
    assert tree.available() == AvailableMemory(650 * MIB, "cgroup")


@pytest.mark.parametrize("version", [1, 2])
def test_an_ancestor_that_binds_is_found(tree: Tree, version: int) -> None:
    tree.process("4:memory:/a/b/c" if version == 1 else "0::/a/b/c")
    tree.mounts(V1_MOUNT if version == 1 else V2_MOUNT)
    base = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    plant = tree.v1 if version == 1 else tree.v2
    plant(f"{base}/a/b/c", NONE_V1 if version == 1 else "max", 10 * MIB)
    plant(f"{base}/a/b", 900 * MIB, 10 * MIB)
    plant(f"{base}/a", 500 * MIB, 400 * MIB)
    assert tree.available() == AvailableMemory(100 * MIB, "cgroup")


@pytest.mark.parametrize(("version", "none"), [(1, NONE_V1), (1, (1 << 63) - 65536), (2, "max")])
def test_unlimited_groups_leave_the_machine(tree: Tree, version: int, none: object) -> None:
    tree.process("4:memory:/job" if version == 1 else "0::/job")
    tree.mounts(V1_MOUNT if version == 1 else V2_MOUNT)
    if version == 1:
        assert isinstance(none, int)
        tree.v1("sys/fs/cgroup/memory/job", none, 5 * MIB)
    else:
        tree.v2("sys/fs/cgroup/job", none, 5 * MIB)
    assert tree.available() == AvailableMemory(8 << 30, "machine")


def test_hybrid_takes_the_smaller_of_both_hierarchies(tree: Tree) -> None:
    tree.process("4:memory:/one", "0::/two")
    tree.mounts(V1_MOUNT, ("/", "/sys/fs/cgroup/unified", "cgroup2", "rw"))
    tree.v1("sys/fs/cgroup/memory/one", 700 * MIB)
    tree.v2("sys/fs/cgroup/unified/two", 600 * MIB)
    assert tree.available() == AvailableMemory(600 * MIB, "cgroup")


def test_container_sees_its_group_at_the_mount_itself(tree: Tree) -> None:
    # The path is the host's and the mount's root is that same group.
    tree.process("4:memory:/docker/abc/inner")
    tree.mounts(("/docker/abc", "/sys/fs/cgroup/memory", "cgroup", "ro,memory"))
    tree.v1("sys/fs/cgroup/memory", 400 * MIB)
    tree.v1("sys/fs/cgroup/memory/inner", 300 * MIB)
    assert tree.available() == AvailableMemory(300 * MIB, "cgroup")


@pytest.mark.parametrize("path", ["/docker/abcdef", "/../sibling", "/"])
def test_a_path_outside_of_the_mount_means_the_mount(tree: Tree, path: str) -> None:
    tree.process(f"0::{path}")
    tree.mounts(("/docker/abc" if path != "/../sibling" else "/", "/my\\040groups", "cgroup2", ""))
    tree.mounts(("/docker/abc", "/my\\040groups", "cgroup2", "rw"))
    tree.v2("my groups", 250 * MIB, 50 * MIB)
    assert tree.available() == AvailableMemory(200 * MIB, "cgroup")


def test_a_group_over_its_limit_has_nothing_left(tree: Tree) -> None:
    tree.process("0::/job")
    tree.mounts(V2_MOUNT)
    tree.v2("sys/fs/cgroup/job", 100 * MIB, 150 * MIB)
    assert tree.available() == AvailableMemory(0, "cgroup")


def test_old_kernels_without_memavailable(tree: Tree) -> None:
    tree.write("proc/meminfo", "MemTotal: 999 kB\nMemFree: 1024 kB\nCached: 1024 kB\n")
    assert tree.available() == AvailableMemory(2 * MIB, "machine")


def test_without_proc_psutil_answers(tmp_path: Path) -> None:
    found = available_memory(root=str(tmp_path))
    assert found.limit == "machine"
    assert 0 < found.bytes <= psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_AS")
def test_address_space_limit_counts_what_is_used(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10 * MIB, 10 * MIB))
    assert tree.available() == AvailableMemory(9 * MIB, "machine")


def own_peak(tree: Tree) -> int | None:
    """The most the nearest group that counts the process's memory ever used."""
    groups = cgroups(str(tree.root))
    own = next((group for group in groups if group.number(group.usage) is not None), None)
    return None if own is None else own.number(own.peak)


def test_peak_of_the_own_group(tree: Tree) -> None:
    assert own_peak(tree) is None
    tree.process("0::/a/b")
    tree.mounts(V2_MOUNT)
    tree.v2("sys/fs/cgroup/a", "max", 5)
    tree.write("sys/fs/cgroup/a/memory.peak", 99)
    tree.v2("sys/fs/cgroup/a/b", "max", 5)
    # The parent's peak is not this process's: none is told until the own group tells it.
    assert own_peak(tree) is None
    tree.write("sys/fs/cgroup/a/b/memory.peak", 77)
    assert own_peak(tree) == 77


def test_importing_brings_neither_torch_nor_psutil() -> None:
    code = (
        "import sys, streamload.system.memory as m, streamload.system.peaks as p\n"
        "m.available_memory(); p.PeakSampler()\n"
        "print([n for n in ('torch', 'numpy', 'psutil') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]" or sys.platform != "linux"
