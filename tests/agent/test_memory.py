"""What the kernel says of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.engine.host import describe_exit
from agent.memory import oom_kills

V2 = {"proc/self/cgroup": "0::/system.slice/agent.service\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/agent\n2:cpu,cpuacct:/\n0::/\n"}
EVENTS = {"sys/fs/cgroup/system.slice/agent.service/memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"}
CONTROL = {"sys/fs/cgroup/memory/agent/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}
VMSTAT = {"proc/vmstat": "pgfault 17\noom_kill 108\nunevictable_pgs_culled 0\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2 | EVENTS | VMSTAT, 3),
        (V1 | CONTROL | VMSTAT, 5),
        (V2 | VMSTAT, 108),
        (V1 | {"sys/fs/cgroup/memory/agent/memory.oom_control": "under_oom 0\n"} | VMSTAT, 108),
        (V2, 0),
    ],
    ids=["cgroup v2", "cgroup v1", "no file", "an old kernel's", "nothing"],
)
def test_who_was_killed_for_want_of_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == expected


def test_this_machine_says_something() -> None:
    assert oom_kills() >= 0


def test_how_a_process_ended_is_said() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-11) == describe_exit(-11, out_of_memory=True) == "was killed by SIGSEGV"
    assert describe_exit(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(-9, out_of_memory=False) == "was killed by SIGKILL"
    assert describe_exit(-9, out_of_memory=True) == "was killed by SIGKILL, because memory ran out"
