"""How an engine loads while others compute: behind them, and on one core.

Both are undone when it is ready, for every thread that was made meanwhile: threads of the runtime's pool inherit them.
A niceness that may not be taken back (RLIMIT_NICE; the unit's LimitNICE= allows it) is not taken on.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

# A tenth of a core beside one that is busy (sched(7), weights 110 and 1024): others hardly notice, and loading ends.
_STEP, _NICEST = 10, 19
# linux/capability.h
_CAP_SYS_NICE = 23


def step_back(process: int) -> None:
    """Have a process that was just started be nice from its first moment, where it can take that back."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if _may_return_to(before):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process, min(before + _STEP, _NICEST))


@contextlib.contextmanager
def behind_others(before: int) -> Iterator[None]:
    """Every thread of this process is nice within the block, where that can be undone; then as nice as `before`."""
    if not _may_return_to(before):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, min(before + _STEP, _NICEST))
    try:
        yield
    finally:
        _for_all_threads(lambda thread: os.setpriority(os.PRIO_PROCESS, thread, before))


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Every thread of this process runs on one and the same core within the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        _for_all_threads(lambda thread: os.sched_setaffinity(thread, before))


def _may_return_to(nice: int) -> bool:
    """Whether this process may lower its niceness to that (getrlimit(2), RLIMIT_NICE)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1) or limit == resource.RLIM_INFINITY or limit >= 20 - nice


def _for_all_threads(undo: Callable[[int], None]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            undo(int(thread.name))
