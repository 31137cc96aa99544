"""The peak of a service by phase and kind, sampled while it loads and runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from compile.limits import Charged
from compile.processes import Mapped, Status, forget_peak, mapped_of, status_of, tree_of

LOAD, RUN = "load", "run"
# Reading page tables costs about a millisecond per 100 MB; a sample then waits at least as long as it took.
_PAUSE_S = 0.01
# The counters of a process are cheap: anonymous memory, where kernels' scratch comes and goes, is read more often. They
# also say to a few milliseconds when loading ends.
_POLL_S = 0.002


@dataclasses.dataclass(frozen=True)
class Peak:
    """One phase (bytes). `at` is the moment of the largest anonymous + weights + shared, `anonymous` that of each
    process then, the gateway first; `own` each kind's own peak.

    `unseen` is what the kernel's peak of each process (VmHWM) has above the largest that was seen of that process: no
    spike was larger. It also holds library pages, so it is a bound and no measurement.
    """

    at: Mapped
    own: Mapped
    anonymous: tuple[int, ...]
    unseen: int
    samples: int


@dataclasses.dataclass
class _Phase:
    at: Mapped = dataclasses.field(default_factory=Mapped)
    own: Mapped = dataclasses.field(default_factory=Mapped)
    anonymous: tuple[int, ...] = ()
    last: Mapped = dataclasses.field(default_factory=Mapped)
    resident: dict[int, int] = dataclasses.field(default_factory=dict)
    kept: dict[int, int] = dataclasses.field(default_factory=dict)
    samples: int = 0

    def count(self, seen: Mapped, anonymous: tuple[int, ...]) -> None:
        if service_bytes(seen) > service_bytes(self.at):
            self.at, self.anonymous = seen, anonymous
        self.own = Mapped(*map(max, dataclasses.astuple(self.own), dataclasses.astuple(seen)))

    def peak(self) -> Peak:
        unseen = sum(max(self.kept[pid] - self.resident.get(pid, 0), 0) for pid in self.kept)
        return Peak(self.at, self.own, self.anonymous, unseen, self.samples)


class Sampler:
    """Watches a process and its children from a thread of its own, from `with` to its end.

    Loading ends, and the run phase begins, when the slab that requests travel in is first touched: then the agent
    runs the bundle's sample, to be warm before it says that it is ready. `serving()` begins the run phase in any case.
    """

    def __init__(self, pid: int, folders: Sequence[Path], charged: Callable[[], Charged | None]) -> None:
        self._pid = pid
        self._folders = folders
        self._charged = charged
        self._phases = {LOAD: _Phase(), RUN: _Phase()}
        self._now = LOAD
        self._pids: Sequence[int] = [pid]
        self._charged_peak = Charged(0, 0, 0, 0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._watch, self._poll)]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sample()
        self._stop.set()
        for thread in self._threads:
            thread.join()

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
        took = 0.0
        while not self._stop.wait(max(_PAUSE_S, took)):
            began = time.monotonic()
            self._sample()
            took = time.monotonic() - began

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            statuses = _statuses(self._pids)
            with self._lock:
                if any(status.shared for status in statuses.values()):
                    self._begin_run(self._pids)
                phase = self._phases[self._now]
                self._keep_peaks(phase, statuses)
                anonymous = tuple(status.anonymous for status in statuses.values())
                # A process's own part of the slab is less than the whole, and newer than the last sample's whole.
                shared = max([phase.last.shared, *(status.shared for status in statuses.values())])
                phase.count(dataclasses.replace(phase.last, anonymous=sum(anonymous), shared=shared), anonymous)

    def _sample(self) -> None:
        pids = self._pids = tree_of(self._pid)
        statuses = _statuses(pids)
        parts = [mapped_of(pid, self._folders) for pid in statuses]
        charged = self._charged()
        with self._lock:
            if any(part.shared for part in parts):
                self._begin_run(pids)
            phase = self._phases[self._now]
            phase.samples += 1
            phase.last = sum(parts, Mapped())
            phase.count(phase.last, tuple(part.anonymous for part in parts))
            if charged is not None:
                self._charged_peak = self._charged_peak.largest(charged)

    def _begin_run(self, pids: Sequence[int]) -> None:
        if self._now == LOAD:
            self._now = RUN
            for pid in pids:
                forget_peak(pid)

    @staticmethod
    def _keep_peaks(phase: _Phase, statuses: Mapping[int, Status]) -> None:
        for pid, status in statuses.items():
            phase.resident[pid] = max(phase.resident.get(pid, 0), status.resident)
            phase.kept[pid] = status.peak_resident


def _statuses(pids: Sequence[int]) -> dict[int, Status]:
    return {pid: status for pid in pids if (status := status_of(pid))}


def service_bytes(seen: Mapped) -> int:
    """What a plan is about: everything but shared libraries."""
    return seen.anonymous + seen.weights + seen.shared
