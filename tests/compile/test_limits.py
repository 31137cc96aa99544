"""Hard limits: what can be made here kills what exceeds it, and the kernel's files are read right everywhere."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compile.errors import OptionError
from compile.limits import Cgroup1, Cgroup2, Charged, DataLimit, ancestors, delegates_memory, limited

MIB = 1 << 20
# Touches every page of so many MiB, then says so.
HOG = "import sys; block = bytearray(int(sys.argv[1]) << 20); block[::4096] = b'x' * len(block[::4096]); print('held')"


def hog(mib: int) -> list[str]:
    return [sys.executable, "-c", HOG, str(mib)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_exceeds_the_limit_is_ended_and_counted() -> None:
    with limited(96 * MIB) as limit:
        done = run(limit.command(hog(400)))
        assert "held" not in done.stdout
        if limit.exact:
            assert done.returncode == -signal.SIGKILL
            assert limit.oom_kills() == 1
            charged = limit.charged()
            assert charged is not None
            assert 90 * MIB < charged.peak <= 96 * MIB
        else:
            assert "MemoryError" in done.stderr


def test_what_stays_below_is_left_alone_and_counted() -> None:
    with limited(400 * MIB) as limit:
        done = run(limit.command(hog(100)))
        assert done.stdout == "held\n", done.stderr
        assert limit.oom_kills() == 0
        charged = limit.charged()
        assert charged is None or charged.peak > 100 * MIB


def test_children_are_under_the_same_limit() -> None:
    with limited(96 * MIB) as limit:
        program = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode != 0)"
        done = run(limit.command([sys.executable, "-c", program, *hog(400)]))
        assert done.returncode != 0
        assert "held" not in done.stdout


def test_a_group_is_gone_with_its_context() -> None:
    with limited(64 * MIB) as limit:
        folder = limit.folder if isinstance(limit, (Cgroup1, Cgroup2)) else None
    assert folder is None or not folder.exists()


def test_the_last_resort_lets_allocations_fail() -> None:
    limit = DataLimit(128 * MIB)
    assert not limit.exact
    assert "MemoryError" in run(limit.command(hog(400))).stderr
    assert run(DataLimit(1 << 40).command(hog(4))).stdout == "held\n"
    assert (limit.charged(), limit.oom_kills()) == (None, 0)


@pytest.mark.parametrize("nbytes", [0, 4095, 1 << 62])
def test_a_limit_that_no_kernel_takes_is_named(nbytes: int) -> None:
    with pytest.raises(OptionError, match="cannot be set"), limited(nbytes):
        pass


UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
LEGACY = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)


def test_groups_are_found_in_the_unified_hierarchy() -> None:
    found = ancestors(UNIFIED, "0::/user.slice/user-1000.slice/session.scope\n", 2)
    root = Path("/sys/fs/cgroup")
    assert found == (
        root / "user.slice/user-1000.slice/session.scope",
        root / "user.slice/user-1000.slice",
        root / "user.slice",
        root,
    )
    assert ancestors(UNIFIED, "0::/\n", 2) == (root,)
    assert ancestors(UNIFIED, "0::/a\n", 1) == ()


def test_groups_are_found_in_the_memory_controllers_own_hierarchy() -> None:
    membership = "5:devices:/x\n4:memory:/box/1\n0::/\n"
    root = Path("/sys/fs/cgroup/memory")
    assert ancestors(LEGACY, membership, 1) == (root / "box/1", root / "box", root)
    assert ancestors(LEGACY, membership, 2) == ()
    assert ancestors("", "", 1) == ()


def test_a_mount_that_shows_a_part_of_the_hierarchy() -> None:
    mount = r"35 31 0:32 /docker/abc /mnt/cgroup\040v1 rw - cgroup cgroup rw,memory" + "\n"
    point = Path("/mnt/cgroup v1")
    assert ancestors(mount, "4:memory:/docker/abc/inner\n", 1) == (point / "inner", point)
    assert ancestors(mount, "4:memory:/elsewhere\n", 1) == (point,)
    assert ancestors(UNIFIED, "0::/../outside\n", 2) == (Path("/sys/fs/cgroup"),)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_2_as_the_kernel_writes_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        memory__stat="anon 1000\nfile 5000\nshmem 300\nfile_mapped 40\n",
        memory__peak="9000\n",
        memory__events="low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
    )
    group = Cgroup2(tmp_path, 8192)
    assert group.charged() == Charged(anonymous=1000, file=4700, shared=300, peak=9000)
    assert group.oom_kills() == 1
    group.limit()
    assert (tmp_path / "memory.max").read_text() == "8192"
    assert (tmp_path / "memory.swap.max").read_text() == "0"


def test_version_1_as_the_kernel_writes_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        memory__stat="cache 1\ntotal_cache 5000\ntotal_rss 1000\ntotal_shmem 300\n",
        memory__max_usage_in_bytes="9000\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    group = Cgroup1(tmp_path, 8192)
    assert group.charged() == Charged(anonymous=1000, file=4700, shared=300, peak=9000)
    assert group.oom_kills() == 3
    group.limit()
    assert (tmp_path / "memory.limit_in_bytes").read_text() == "8192"


def test_only_groups_with_a_memory_controller_are_used(tmp_path: Path) -> None:
    assert not delegates_memory(tmp_path)
    write(tmp_path, cgroup__controllers="cpu io\n", cgroup__subtree_control="cpu\n")
    assert not delegates_memory(tmp_path)
    write(tmp_path, cgroup__controllers="cpu memory\n", cgroup__subtree_control="cpu\n")
    assert delegates_memory(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
