"""The peak of a service by phase and kind, sampled while it loads and runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from compile.limits import Charged
from compile.processes import Mapped, Status, forget_peak, mapped_of, stands_still, status_of, tree_of

LOAD, RUN = "load", "run"
# The counters of a process cost 0.1 ms. Page tables, which alone tell weights from libraries, cost about a millisecond
# per 100 MB, and are read when the counters say that there is more in memory than there ever was in this phase.
_POLL_S = 0.0005
_RISE_BYTES = 128 << 10
# That often in any case: within what the counters count, pages may go from one kind to another.
_PAUSE_S = 0.5
# A thread that waits for a busy CPU stops when it gets it.
_STOP_S = 0.2


@dataclasses.dataclass(frozen=True)
class Peak:
    """One phase (bytes). `at` is the moment of the largest anonymous + weights + shared, `anonymous` that of each
    process then, the gateway first; `own` each kind's own peak.

    `unseen` is what the kernel's peak of each process (VmHWM) has above the largest that was seen of that process, for
    the processes that were there at a time: no spike was larger. It also holds library pages, so it is a bound and no
    measurement.
    """

    at: Mapped
    own: Mapped
    anonymous: tuple[int, ...]
    unseen: int
    samples: int

    @property
    def nbytes(self) -> int:
        """The most that the service can have had at any moment."""
        return service_bytes(self.at) + self.unseen


@dataclasses.dataclass
class _Phase:
    at: Mapped = dataclasses.field(default_factory=Mapped)
    own: Mapped = dataclasses.field(default_factory=Mapped)
    anonymous: tuple[int, ...] = ()
    resident: dict[int, int] = dataclasses.field(default_factory=dict)
    kept: dict[int, int] = dataclasses.field(default_factory=dict)
    together: set[frozenset[int]] = dataclasses.field(default_factory=set)
    highest: int = 0
    samples: int = 0

    def count(self, parts: Sequence[Mapped]) -> None:
        seen = sum(parts, Mapped())
        self.samples += 1
        if service_bytes(seen) > service_bytes(self.at):
            self.at, self.anonymous = seen, tuple(part.anonymous for part in parts)
        self.own = Mapped(*map(max, dataclasses.astuple(self.own), dataclasses.astuple(seen)))

    def keep_peaks(self, statuses: Mapping[int, Status]) -> None:
        self.highest = max(self.highest, _resident(statuses))
        self.together.add(frozenset(statuses))
        for pid, status in statuses.items():
            self.resident[pid] = max(self.resident.get(pid, 0), status.resident)
            self.kept[pid] = status.peak_resident

    def peak(self) -> Peak:
        above = {pid: max(self.kept[pid] - self.resident.get(pid, 0), 0) for pid in self.kept}
        unseen = max((sum(above[pid] for pid in pids) for pids in self.together), default=0)
        return Peak(self.at, self.own, self.anonymous, unseen, self.samples)


class Sampler:
    """Watches a process and its children from a thread of its own, from `with` to its end.

    While page tables are read the processes stand still: loading a small model takes a few milliseconds, and all that
    it has in memory is that of one moment. Loading ends, and the run phase begins, when the slab that requests travel
    in is first touched: then the agent runs the bundle's sample, to be warm before it says that it is ready.
    `serving()` begins the run phase in any case.
    """

    def __init__(self, pid: int, folders: Sequence[Path], charged: Callable[[], Charged | None]) -> None:
        self._pid = pid
        self._folders = folders
        self._charged = charged
        self._phases = {LOAD: _Phase(), RUN: _Phase()}
        self._now = LOAD
        self._charged_peak = Charged(0, 0, 0, 0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sample()
        self._stop.set()
        self._thread.join()

    def serving(self) -> None:
        """The service is ready."""
        self._sample()
        with self._lock:
            self._begin_run(tree_of(self._pid))
        self._sample()

    @property
    def charged(self) -> Charged | None:
        """Peak of each kind that the limit's mechanism counted; None where it does not count."""
        return self._charged_peak if self._charged_peak.peak else None

    def peak(self, phase: str) -> Peak:
        """What was seen of that phase so far."""
        with self._lock:
            return self._phases[phase].peak()

    def _watch(self) -> None:
        _hurry()
        known: Sequence[int] = []
        sampled = 0.0
        while not self._stop.wait(_POLL_S):
            pids = tree_of(self._pid)
            statuses = _statuses(pids)
            phase = self._phases[self._now]
            new = pids != known or self._begins(statuses)
            if new or _resident(statuses) > phase.highest + _RISE_BYTES or time.monotonic() - sampled > _PAUSE_S:
                known = self._sample()
                sampled = time.monotonic()
            else:
                with self._lock:
                    phase.keep_peaks(statuses)

    def _begins(self, statuses: Mapping[int, Status]) -> bool:
        return self._now == LOAD and any(status.shared for status in statuses.values())

    def _sample(self) -> Sequence[int]:
        """Read all there is to know; the processes that there are."""
        charged = self._charged()
        with self._lock, _stopped(pids := tree_of(self._pid)):
            if self._begins(_statuses(pids)):
                self._begin_run(pids)
            phase = self._phases[self._now]
            statuses = _statuses(pids)
            phase.keep_peaks(statuses)
            phase.count([mapped_of(pid, self._folders) for pid in statuses])
            if charged is not None:
                self._charged_peak = self._charged_peak.largest(charged)
        return pids

    def _begin_run(self, pids: Sequence[int]) -> None:
        if self._now == LOAD:
            self._now = RUN
            for pid in pids:
                forget_peak(pid)


def _hurry() -> None:
    """Let this thread run whenever it wants to, where that is allowed (CAP_SYS_NICE): what it watches must not get far
    ahead of it on a busy machine."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    """The processes stand still until the block ends."""
    try:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_S
        while not all(map(stands_still, pids)) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _statuses(pids: Sequence[int]) -> dict[int, Status]:
    return {pid: status for pid in pids if (status := status_of(pid))}


def _resident(statuses: Mapping[int, Status]) -> int:
    return sum(status.resident for status in statuses.values())


def service_bytes(seen: Mapped) -> int:
    """What a plan is about: everything but shared libraries."""
    return seen.anonymous + seen.weights + seen.shared
