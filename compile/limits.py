"""Hard memory limits for a command and all its children: cgroup v2, cgroup v1, or else a limit of the process.

A cgroup limits memory: what the group's processes touch, with the page cache that they cause, and the kernel kills
inside it when that cannot be held. A process limit (RLIMIT_DATA) only limits address space, per process; it is the
last resort and says so. RLIMIT_AS would be worse: it counts every mapped file, weights and libraries, touched or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from compile.errors import OptionError

# A group can be removed once the kernel has let go of its last process, which takes a moment after the exit.
_REMOVE_S = 5.0
_serial = itertools.count()


@dataclasses.dataclass(frozen=True)
class Charged:
    """Bytes that a cgroup is charged for now, by kind, and its peak (of the sum) since it was made.

    `file` is page cache: mapped files, and files that were only read (digests); `shared` is not part of it.
    """

    anonymous: int
    file: int
    shared: int
    peak: int

    def largest(self, other: Charged) -> Charged:
        """Of each figure the larger."""
        return Charged(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


class Limit(Protocol):
    """A limit in force while its context is open."""

    @property
    def mechanism(self) -> str:
        """What enforces it: `cgroup v2`, `cgroup v1`, `RLIMIT_DATA`."""

    @property
    def nbytes(self) -> int:
        """The limit."""

    @property
    def exact(self) -> bool:
        """Whether it limits memory, and not address space."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, started so that it and its children are under the limit from their first byte."""

    def charged(self) -> Charged | None:
        """What is charged now; None where the mechanism does not count."""

    def oom_kills(self) -> int:
        """Processes that the kernel killed because of the limit; always 0 where the mechanism does not count."""


@dataclasses.dataclass(frozen=True)
class DataLimit:
    """RLIMIT_DATA: private writable address space of each process by itself (Linux 4.7 and later).

    Neither the page cache nor the slab that both processes share is counted, and nothing is killed: allocations fail.
    """

    nbytes: int
    mechanism = "RLIMIT_DATA"
    exact = False

    def command(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", f'ulimit -d {max(self.nbytes >> 10, 1)} && exec "$@"', "sh", *command]

    def charged(self) -> Charged | None:
        return None

    def oom_kills(self) -> int:
        return 0


class _Cgroup:
    """What both versions share: a folder that a process writes its id into."""

    exact = True

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        self.nbytes = nbytes

    def command(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *command]

    def _number(self, name: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / name).read_text(encoding="ascii"))
        return 0

    def _fields(self, name: str) -> dict[str, int]:
        return key_values((self.folder / name).read_text(encoding="ascii"))


class Cgroup2(_Cgroup):
    """The unified hierarchy. `memory.peak` needs Linux 5.19; before, the peak reads 0."""

    mechanism = "cgroup v2"

    def limit(self) -> None:
        """Set the limit; swap would only hide what does not fit. Raises OSError."""
        (self.folder / "memory.max").write_text(str(self.nbytes), encoding="ascii")
        with contextlib.suppress(OSError):
            (self.folder / "memory.swap.max").write_text("0", encoding="ascii")

    def charged(self) -> Charged:
        stat = self._fields("memory.stat")
        shared = stat.get("shmem", 0)
        return Charged(stat.get("anon", 0), stat.get("file", 0) - shared, shared, self._number("memory.peak"))

    def oom_kills(self) -> int:
        return self._fields("memory.events").get("oom_kill", 0)


class Cgroup1(_Cgroup):
    """The memory controller's own hierarchy."""

    mechanism = "cgroup v1"

    def limit(self) -> None:
        """Set the limit, and the same for memory and swap together where swap is counted. Raises OSError."""
        (self.folder / "memory.limit_in_bytes").write_text(str(self.nbytes), encoding="ascii")
        with contextlib.suppress(OSError):
            (self.folder / "memory.memsw.limit_in_bytes").write_text(str(self.nbytes), encoding="ascii")

    def charged(self) -> Charged:
        stat = self._fields("memory.stat")
        shared = stat.get("total_shmem", 0)
        file = stat.get("total_cache", 0) - shared
        return Charged(stat.get("total_rss", 0), file, shared, self._number("memory.max_usage_in_bytes"))

    def oom_kills(self) -> int:
        return self._fields("memory.oom_control").get("oom_kill", 0)


def key_values(text: str) -> dict[str, int]:
    """`name 123` lines, the kernel's flat keyed files."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Limit]:
    """The most exact limit that this user may set on this machine, in force while the context is open.

    Raises OptionError when the limit is below a page or no number of bytes the kernel can hold.
    """
    if not os.sysconf("SC_PAGE_SIZE") <= nbytes < 1 << 62:
        raise OptionError(f"a limit of {nbytes} bytes cannot be set", "give one like 900MiB or 3.4GiB")
    group = _make_group(nbytes)
    if group is None:
        yield DataLimit(nbytes)
        return
    try:
        yield group
    finally:
        _remove(group.folder)


def _make_group(nbytes: int) -> Cgroup2 | Cgroup1 | None:
    """A new cgroup with that limit which processes can be moved into; None where this user may make none."""
    mounts = _read("/proc/self/mountinfo")
    membership = _read("/proc/self/cgroup")
    for parent in ancestors(mounts, membership, 2):
        if delegates_memory(parent) and (group := _try(Cgroup2, parent, nbytes)):
            return group
    # Version 1 from the top: there, the limit of a group in between would count as well and blur what killed.
    for parent in reversed(ancestors(mounts, membership, 1)):
        if group := _try(Cgroup1, parent, nbytes):
            return group
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _try(kind: type[Cgroup2] | type[Cgroup1], parent: Path, nbytes: int) -> Cgroup2 | Cgroup1 | None:
    group = kind(parent / f"tightfit-prove-{os.getpid()}-{next(_serial)}", nbytes)
    try:
        group.folder.mkdir()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        group.limit()
        # Moving a process also needs a right on the group above both its old and its new one: only a try can tell.
        done = subprocess.run(group.command(["true"]), capture_output=True, check=False)
        if done.returncode == 0:
            return group
    _remove(group.folder)
    return None


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        if not folder.exists():
            return
        time.sleep(0.05)


_ESCAPE = re.compile(r"\\([0-7]{3})")


def ancestors(mountinfo: str, membership: str, version: int) -> tuple[Path, ...]:
    """Folders of this process's group and of those above it, its own first, the mount point last.

    `mountinfo` and `membership` are the texts of /proc/self/mountinfo and /proc/self/cgroup; empty where the memory
    controller of that version is not mounted.
    """
    own = _own_group(membership, version)
    mount = _mount(mountinfo, version)
    if own is None or mount is None:
        return ()
    root, point = mount
    try:
        inside = Path(own).relative_to(root)
    except ValueError:
        return (point,)
    if ".." in inside.parts:
        return (point,)
    here = point / inside
    return (here, *(parent for parent in here.parents if parent == point or point in parent.parents))


def _own_group(membership: str, version: int) -> str | None:
    """`4:memory:/a/b` of version 1, `0::/a/b` of version 2."""
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(",") if version == 1 else (number, controllers) == ("0", ""):
            return path
    return None


def _mount(mountinfo: str, version: int) -> tuple[str, Path] | None:
    """(root of the mount inside the hierarchy, where it is mounted); see proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        wanted = kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and "memory" in kind[2].split(",")
        if wanted:
            root, point = (_ESCAPE.sub(lambda m: chr(int(m[1], 8)), fields[i]) for i in (3, 4))
            return root, Path(point)
    return None


def delegates_memory(parent: Path) -> bool:
    """Whether groups made below that folder of version 2 get a memory controller; switches it on where allowed."""
    try:
        if "memory" not in (parent / "cgroup.controllers").read_text(encoding="ascii").split():
            return False
        switch = parent / "cgroup.subtree_control"
        if "memory" not in switch.read_text(encoding="ascii").split():
            switch.write_text("+memory", encoding="ascii")
    except OSError:
        return False
    return True
