"""What loads quietly is not quiet afterwards, whichever threads it made."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.engine.quiet import behind_others, on_one_core
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import serving

ROOT = Path(__file__).parents[3]


def test_threads_that_are_made_on_one_core_have_all_afterwards() -> None:
    before = os.sched_getaffinity(0)
    made, done = threading.Event(), threading.Event()
    inside: list[set[int]] = []

    def work() -> None:
        inside.append(os.sched_getaffinity(0))
        made.set()
        done.wait(60)
        inside.append(os.sched_getaffinity(0))

    with on_one_core():
        thread = threading.Thread(target=work)
        thread.start()
        made.wait(60)
    done.set()
    thread.join()
    assert inside == [{max(before)}, before]
    assert os.sched_getaffinity(0) == before


def test_niceness_is_taken_on_only_where_it_can_be_taken_back() -> None:
    """As whoever runs this, and, where that is root, without any right: a process cannot take that back either."""
    code = (
        "import os\n"
        "nice = lambda: os.getpriority(os.PRIO_PROCESS, 0)\n"
        "from agent.engine.quiet import _may_return_to, behind_others\n"
        "for user in (os.geteuid(), 65534):\n"
        "    if os.geteuid() == 0: os.setuid(user)\n"
        "    before, may = nice(), _may_return_to(nice())\n"
        "    with behind_others(before): inside = nice()\n"
        "    assert (inside, nice()) == (min(before + 10, 19) if may else before, before), (inside, before)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_error_ends_it_as_well() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(KeyError), behind_others(before), on_one_core():
        raise KeyError
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_an_engine_that_loaded_quietly_is_as_its_gateway(tmp_path: Path) -> None:
    """Every thread of it: those that compute are made while it loads."""
    first, second = (bundles.identity(tmp_path / f"{name}.tfb", DType.FLOAT32) for name in "ab")
    config = tmp_path / "agent.toml"
    config.write_text(f'[[models]]\nbundle = "{first}"\n[[models]]\nbundle = "{second}"\n')
    with serving(None, tmp_path / "log", "--config", str(config), "--threads", "2") as agent:
        nice = os.getpriority(os.PRIO_PROCESS, agent.process.pid)
        for pid in agent.engine_pids:
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
                assert os.getpriority(os.PRIO_PROCESS, thread) == nice
                assert os.sched_getaffinity(thread) == os.sched_getaffinity(agent.process.pid)
