"""What a tree of processes has in memory, by kind, from /proc.

Anonymous memory and the shared slab are exact. File-backed memory counts only the mappings of given folders (a bundle,
its finalised weights): shared libraries stand apart, because how much of them is resident depends on who else uses
them, and belong to the fixed cost of the runtime.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Status:
    """The cheap counters of one process: resident now by kind and in all, and the kernel's peak (bytes)."""

    anonymous: int
    shared: int
    resident: int
    peak_resident: int


@dataclasses.dataclass(frozen=True)
class Mapped:
    """What the page tables of one process say (bytes).

    `anonymous` is private; `shared` this process's part of memory files, so that the parts of all who map them make
    the whole; `weights` resident pages of files in the given folders; `libraries` its part of all other files.
    """

    anonymous: int = 0
    shared: int = 0
    weights: int = 0
    libraries: int = 0

    def __add__(self, other: Mapped) -> Mapped:
        return Mapped(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


def status_of(pid: int) -> Status | None:
    """Counters of /proc/PID/status; None when the process is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(_SIZES.findall(text))
    if "VmRSS" not in fields:
        return None
    return Status(*(int(fields.get(name, 0)) * KIB for name in ("RssAnon", "RssShmem", "VmRSS", "VmHWM")))


_SIZES = re.compile(r"^(RssAnon|RssShmem|VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def stands_still(pid: int) -> bool:
    """Whether every thread of the process is stopped by a signal, or it is gone."""
    return all(_state(task) in _STILL for task in _listed(Path(f"/proc/{pid}/task")))


# proc_pid_stat(5): stopped, traced, dead, zombie; nothing when it is gone.
_STILL = frozenset("TtXxZ") | {""}


def _state(task: Path) -> str:
    with contextlib.suppress(OSError):
        # `pid (name) state ppid ...`; the name may hold anything, so what follows its last bracket counts.
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    return ""


def forget_peak(pid: int) -> None:
    """Make the kernel's peak (VmHWM) start again from what is resident now."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def mapped_of(pid: int, folders: Sequence[Path]) -> Mapped:
    """Sum over /proc/PID/smaps; all zero when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return Mapped()
    return parse_smaps(text, folders)


# 7f12a000-7f12b000 r--p 00000000 fe:00 1234   /path, then `Name:  12 kB` lines; see proc_pid_smaps(5).
_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)")
_MEMORY_FILES = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")  # noqa: S108 - compared with, never opened


def parse_smaps(text: str, folders: Sequence[Path]) -> Mapped:
    """The text of an smaps file, added up by kind; `folders` are absolute and resolved."""
    prefixes = tuple(f"{folder}/" for folder in folders)
    anonymous = shared = weights = libraries = 0
    path, inode = "", "0"
    pss = 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            pss = _kib(line)
        elif line.startswith("Anonymous:"):
            private = _kib(line)
            anonymous += private
            if path.startswith(_MEMORY_FILES):
                shared += max(pss - private, 0)
            elif path.startswith(prefixes) and prefixes:
                # Not resident pages: the engine may map what it holds in memory a second time.
                weights += max(pss - private, 0)
            elif inode != "0":
                libraries += max(pss - private, 0)
        elif head := _HEAD.fullmatch(line):
            inode, path = head[1], head[2]
    return Mapped(anonymous, shared, weights, libraries)


def _kib(line: str) -> int:
    return int(line.split()[1]) * KIB


def tree_of(pid: int) -> list[int]:
    """The process and all below it that have a program of their own.

    A child between fork and exec still is a copy of its parent: its memory is the parent's and is not counted again.
    """
    found = [pid]
    for each in found:
        found += [child for child in _children(each) if child not in found and _command(child) != _command(each)]
    return found


def _children(pid: int) -> Iterable[int]:
    children: list[int] = []
    for task in _listed(Path(f"/proc/{pid}/task")):
        try:
            children += map(int, (task / "children").read_text(encoding="ascii").split())
        except FileNotFoundError:
            if task.exists():  # a kernel without CONFIG_PROC_CHILDREN
                return _children_by_parent(pid)
        except OSError:
            continue
    return children


def _children_by_parent(pid: int) -> list[int]:
    """The same from every process's word about its parent."""
    children: list[int] = []
    for folder in _listed(Path("/proc")):
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                # `pid (name) state ppid ...`; the name may hold anything, so what follows its last bracket counts.
                fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    children.append(int(folder.name))
    return children


def _listed(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
