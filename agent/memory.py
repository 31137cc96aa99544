"""What this machine has and what a process uses, from /proc."""

from __future__ import annotations

from pathlib import Path

_KIB = 1024
KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}


def mem_total_bytes() -> int:
    """MemTotal: physical memory less what firmware, GPU and kernel took before the system started."""
    return _fields(Path("/proc/meminfo"))["MemTotal"]


def pss_by_kind(pid: int) -> dict[str, int]:
    """Proportional set size in bytes by kind; empty when the process is gone.

    PSS counts a shared page once over all who map it, so the sum over both processes is what the service uses.
    """
    try:
        fields = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    except OSError:
        return {}
    return {kind: fields[name] for name, kind in KINDS.items() if name in fields}


def peak_rss_bytes() -> int:
    """The most that this process had in memory since it was started, file-backed pages included."""
    return _fields(Path("/proc/self/status"))["VmHWM"]


def oom_kills(root: Path = Path("/")) -> int:
    """Processes of this one's control group that the kernel has killed for want of memory; where the group does not
    say, those of the whole machine.

    memory.events of cgroup v2, memory.oom_control of v1; /proc/vmstat (oom_kill in each).
    """
    for file in (*_group_files(root), root / "proc/vmstat"):
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0


def _group_files(root: Path) -> list[Path]:
    """proc(5), /proc/PID/cgroup: lines of id:controllers:path, without an id's controllers for v2."""
    mounted, files = root / "sys/fs/cgroup", []
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(mounted / path.strip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(mounted / "memory" / path.strip("/") / "memory.oom_control")
    return files


def _fields(path: Path) -> dict[str, int]:
    """`Name:   123 kB` lines as bytes."""
    fields: dict[str, int] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].rstrip(":")] = int(words[1]) * _KIB
    return fields
