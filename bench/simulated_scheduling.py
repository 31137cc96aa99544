"""The scheduler against first-in-first-out and fixed batches, in simulated time: no engine, no clock, seeded.

    python -m bench.simulated_scheduling

Prints goodput (answers in time, as a part of what the accelerator can do at most), what was accepted and came late, and
latencies, for Poisson arrivals at 50 to 200 % of capacity on three cost curves, and for a flood beside a client of
higher priority.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agent.request import Request
from agent.scheduling.accelerator import Accelerator
from agent.scheduling.batch import Limits
from agent.scheduling.costs import Costs
from agent.scheduling.door import Door

Curve = Callable[[int], float]


@dataclass(frozen=True)
class Source:
    """Who asks. `rate` requests a second arrive at random, or, where it is 0, `clients` ask one after another; they are
    one client to the scheduler where they are `alike`."""

    name: str
    model: str = "m"
    rate: float = 0.0
    clients: int = 1
    alike: bool = False
    priority: int = 0
    deadline_s: float = 30.0
    rows: int = 1
    think_s: float = 0.0


@dataclass
class Tally:
    """How the requests of one source ended, and after how many seconds those that were answered in time."""

    sent: int = 0
    refused: int = 0
    dropped: int = 0
    late: int = 0
    latencies: list[float] = field(default_factory=list)

    def quantile(self, part: float) -> float:
        """Of the latencies of what was answered in time."""
        ordered = sorted(self.latencies)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


class Policy(Protocol):
    """What decides. `submit` says whether it takes a request; `due` gives up on those that it returns."""

    def submit(self, request: Request, now: float) -> bool: ...

    def next(self, now: float) -> tuple[Request, ...]: ...

    def ended(self, took_s: float, now: float) -> None: ...

    def due(self, now: float) -> list[Request]: ...

    def wakeup(self, now: float) -> float | None: ...


class Tightfit:
    """The agent's scheduler, with a door for whom no slot is free, as the gateway joins them."""

    def __init__(self, limits: dict[str, Limits], measured: dict[str, list[tuple[int, float]]], door: int) -> None:
        self._accelerator = Accelerator()
        self._doors: dict[str, Door[Request]] = {}
        self._slots: dict[str, int] = {}
        for model, each in limits.items():
            self._accelerator.add(model, each, Costs(measured[model]))
            self._doors[model] = Door(door, door)
            self._slots[model] = each.queue
        self._lost: list[Request] = []

    def submit(self, request: Request, now: float) -> bool:
        model = request.model
        if self._slots[model] and not len(self._doors[model]):
            if self._accelerator.submit(request, now) is not None:
                return False
            self._slots[model] -= 1
            return True
        door = self._doors[model]
        if self._accelerator.predict(model, request, door.before(request, now), now) is not None:
            return False
        return door.submit(request, now) is None

    def next(self, now: float) -> tuple[Request, ...]:
        batch = self._accelerator.next(now)
        return batch.requests if batch is not None else ()

    def ended(self, took_s: float, now: float) -> None:
        batch = self._accelerator.running
        assert batch is not None
        self._accelerator.ended(batch, took_s, now)
        self._free(batch.model, len(batch.requests), now)

    def due(self, now: float) -> list[Request]:
        late = self._accelerator.expire(now)
        for request in late:
            self._free(request.model, 1, now)
        late += [request for door in self._doors.values() for request in door.expire(now)]
        late += self._lost
        self._lost = []
        return late

    def wakeup(self, now: float) -> float | None:
        times = (self._accelerator.next_wakeup(now), *(door.next_wakeup() for door in self._doors.values()))
        return min((time for time in times if time is not None), default=None)

    def _free(self, model: str, slots: int, now: float) -> None:
        self._slots[model] += slots
        while self._slots[model] and (request := self._doors[model].next(now)) is not None:
            if self._accelerator.submit(request, now) is None:
                self._slots[model] -= 1
            else:
                self._lost.append(request)


class Fixed:
    """First in, first out, in batches of up to `rows` of one model; what is past its deadline is not begun."""

    def __init__(self, rows: int, queue: int) -> None:
        self._rows, self._limit = rows, queue
        self._queue: list[Request] = []

    def submit(self, request: Request, now: float) -> bool:  # noqa: ARG002 - as the protocol has it
        if len(self._queue) >= self._limit:
            return False
        self._queue.append(request)
        return True

    def next(self, now: float) -> tuple[Request, ...]:  # noqa: ARG002
        batch: list[Request] = []
        for request in self._queue:
            fits = sum(each.rows for each in batch) + request.rows <= self._rows
            if not batch or (fits and (request.model, request.key) == (batch[0].model, batch[0].key)):
                batch.append(request)
        self._queue = [request for request in self._queue if request not in batch]
        return tuple(batch)

    def ended(self, took_s: float, now: float) -> None:
        """Learns nothing."""

    def due(self, now: float) -> list[Request]:
        late = [request for request in self._queue if request.deadline <= now]
        self._queue = [request for request in self._queue if request.deadline > now]
        return late

    def wakeup(self, now: float) -> float | None:  # noqa: ARG002
        return min((request.deadline for request in self._queue), default=None)


@dataclass
class Ran:
    """One batch: when it began, what it took, which requests."""

    began: float
    took_s: float
    requests: tuple[Request, ...]


class Simulation:
    """Sources, a policy and an accelerator that takes what its model's curve says, log-normally about, and thrice that
    for a part of `stalls` of its runs. `run` gives how it ended for each source."""

    def __init__(
        self, policy: Policy, sources: Iterable[Source], curves: dict[str, Curve], seed: int, stalls: float
    ) -> None:
        self.tallies = {source.name: Tally() for source in sources}
        self.ran: list[Ran] = []
        self._policy, self._curves, self._stalls = policy, curves, stalls
        self._random = random.Random(seed)
        self._numbers, self._order = itertools.count(1), itertools.count()
        self._asked: dict[int, tuple[Source, str]] = {}
        # (time, order, what to do then)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._running: Ran | None = None
        for source in sources:
            if source.rate:
                self._arrive_after(0, source)
            for number in range(0 if source.rate else source.clients):
                client = source.name if source.alike else f"{source.name} {number}"
                self._at(self._random.random() * 1e-3, partial(self._ask, source, client))

    def run(self, until: float) -> None:
        """Go on to that time."""
        alarm = float("inf")
        while self._events and self._events[0][0] <= until:
            now, _, act = heapq.heappop(self._events)
            act(now)
            for request in self._policy.due(now):
                self._tally(request).dropped += 1
                self._answered(request, now)
            if self._running is None and (requests := self._policy.next(now)):
                self._begin(requests, now)
            wakeup = self._policy.wakeup(now)
            if now >= alarm:
                alarm = float("inf")
            if wakeup is not None and wakeup < alarm:
                alarm = max(wakeup, now)
                self._at(alarm, lambda _: None)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _arrive_after(self, now: float, source: Source) -> None:
        def arrive(now: float) -> None:
            self._ask(source, source.name, now)
            self._arrive_after(now, source)

        self._at(now + self._random.expovariate(source.rate), arrive)

    def _ask(self, source: Source, client: str, now: float) -> None:
        request = Request(
            next(self._numbers), now + source.deadline_s, 0, (), (), (), source.model, client, source.priority,
            source.rows, (), now,
        )  # fmt: skip
        self._asked[request.id] = source, client
        self._tally(request).sent += 1
        if not self._policy.submit(request, now):
            self._tally(request).refused += 1
            # Who is refused at once asks again a little later.
            self._answered(request, now + 1e-3)

    def _begin(self, requests: tuple[Request, ...], now: float) -> None:
        seconds = self._curves[requests[0].model](sum(request.rows for request in requests))
        seconds *= self._random.lognormvariate(0, 0.1) * (3 if self._random.random() < self._stalls else 1)
        self._running = Ran(now, seconds, requests)
        self.ran.append(self._running)
        self._at(now + seconds, self._end)

    def _end(self, now: float) -> None:
        assert self._running is not None
        for request in self._running.requests:
            if now <= request.deadline:
                self._tally(request).latencies.append(now - request.arrived)
            else:
                self._tally(request).late += 1
            self._answered(request, now)
        self._policy.ended(self._running.took_s, now)
        self._running = None

    def _answered(self, request: Request, now: float) -> None:
        source, client = self._asked.pop(request.id)
        if not source.rate:
            self._at(now + source.think_s, partial(self._ask, source, client))

    def _tally(self, request: Request) -> Tally:
        return self.tallies[self._asked[request.id][0].name]


def simulate(
    policy: Policy,
    sources: list[Source],
    curves: dict[str, Curve],
    duration_s: float,
    seed: int = 1,
    stalls: float = 0.01,
) -> tuple[dict[str, Tally], list[Ran]]:
    """How requests ended, by source, and what ran."""
    simulation = Simulation(policy, sources, curves, seed, stalls)
    simulation.run(duration_s)
    return simulation.tallies, simulation.ran


def flat(rows: int) -> float:
    """A CPU: two rows take what two runs do."""
    return 0.0087 * rows + 0.0001


def steep(rows: int) -> float:
    """A GPU with a small model: sixteen rows take twice what one does."""
    return 0.002 + 0.002 * (rows - 1) / 15


def middle(rows: int) -> float:
    """In between: sixteen rows take three and a half times what one does."""
    return 0.010 * float(rows**0.45)


CURVES = {"flat": flat, "steep": steep, "middle": middle}
ROWS = 16


def capacity(curve: Curve) -> float:
    """The most requests a second."""
    return max(rows / curve(rows) for rows in range(1, ROWS + 1))


def tightfit(curves: dict[str, Curve], slots: int = 32, door: int = 64, wrong: float = 1.0) -> Tightfit:
    """The agent's scheduler; what was measured at load is `wrong` times what a run takes."""
    limits = {model: Limits(slots, slots, ROWS) for model in curves}
    measured = {model: [(rows, wrong * curve(rows)) for rows in (1, 2, 4, 8, 16)] for model, curve in curves.items()}
    return Tightfit(limits, measured, door)


def main() -> None:
    print("curve   load  policy    goodput  refused  dropped  late   p50 ms  p99 ms  rows a batch")
    for name, curve in CURVES.items():
        deadline_s = 10 * curve(1)
        for load in (0.5, 0.8, 0.95, 1.2, 2.0):
            source = Source("s", rate=load * capacity(curve), deadline_s=deadline_s)
            for label, policy in (
                ("tightfit", tightfit({"m": curve})),
                ("fifo", Fixed(1, 96)),
                ("fixed 8", Fixed(8, 96)),
                ("fixed 16", Fixed(16, 96)),
            ):
                seconds = 20_000 / capacity(curve)
                tallies, ran = simulate(policy, [source], {"m": curve}, seconds)
                tally = tallies["s"]
                print(
                    f"{name:7} {load:4.0%}  {label:9} {len(tally.latencies) / seconds / capacity(curve):6.1%}"
                    f"  {tally.refused / tally.sent:7.1%}  {tally.dropped / tally.sent:7.1%}"
                    f"  {tally.late / tally.sent:5.1%}"
                    f"  {tally.quantile(0.5) * 1e3:6.1f}  {tally.quantile(0.99) * 1e3:6.1f}"
                    f"  {sum(len(each.requests) for each in ran) / len(ran):5.2f}"
                )
    print(
        "\nflood: 16 clients of low priority, one of high; p99 of the high one, alone and beside them; their requests/s"
    )
    for name, curve in CURVES.items():
        high = Source("high", priority=1, think_s=0.005)
        low = Source("low", priority=200, clients=16)
        seconds = 3000 * curve(1)
        alone, _ = simulate(tightfit({"m": curve}), [high], {"m": curve}, seconds)
        low_alone, _ = simulate(tightfit({"m": curve}), [low], {"m": curve}, seconds)
        both, _ = simulate(tightfit({"m": curve}), [high, low], {"m": curve}, seconds)
        p99 = alone["high"].quantile(0.99), both["high"].quantile(0.99)
        served = len(both["low"].latencies) + len(both["high"].latencies)
        print(
            f"{name:7} {p99[0] * 1e3:6.1f} ms -> {p99[1] * 1e3:6.1f} ms ({p99[1] / p99[0]:.2f} x)"
            f"  throughput {served / len(low_alone['low'].latencies):.2f} x"
        )


if __name__ == "__main__":
    main()
