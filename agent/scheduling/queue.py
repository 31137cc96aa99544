"""Who waits, and in which order: priority, then turns between clients, then deadlines.

Theory of operation. Entries are ordered by (level, turn, deadline).

*Level.* A request has its priority, from 1, the highest, to 255. Every `age_s` of waiting halves the number, and where
that gives 0, after at most eight times `age_s`, it goes before all that are younger: nobody starves, and a priority
means something for as long as a request that can wait does wait.

*Turn.* Clients of one priority take turns. A client's turn is what it was served since it began to wait, less the least
that anyone was who waits with it, plus what of its own comes before: start-time fair queueing (Goyal, Vin, Cheng,
SIGCOMM 1996), in which a newcomer starts level with whoever had least. A client that has fifty requests waiting so
delays the first of another by one at most. Who has nothing waiting is forgotten, so that memory is bounded.

*Deadline.* Within a turn, and of one client, the earliest deadline goes first.

The order is worked out when it is asked for. What waits holds a slot or a connection, so it is tens, and a sort of them
costs less than keeping the order through ageing, cancellation and turns would.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from agent.errors import Reason
from agent.request import Refused

HIGHEST, DEFAULT_PRIORITY, LOWEST = 1, 128, 255

AGE_S = 2.0
"""How long a wait halves a priority. The lowest is so raised to the top in 16 s, within the default deadline."""

EXPIRED = Refused(Reason.DEADLINE, "the deadline passed before the answer was there")


class Waiting(Protocol):
    """What can be queued. Times are of the monotonic clock, in seconds; `priority` 0 stands for the default."""

    @property
    def id(self) -> int: ...

    @property
    def client(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def arrived(self) -> float: ...

    @property
    def deadline(self) -> float: ...


W = TypeVar("W", bound=Waiting)

Rank = tuple[int, float, float, int]
"""(level, turn, deadline, number); the least is the next."""


@dataclass(slots=True)
class _Flow(Generic[W]):
    """What one client waits for at one priority, by deadline, and what it was served since it began to wait."""

    served: float
    entries: list[W]


class Queue(Generic[W]):
    """At most `limit` entries, at most `per_client` of one client. `share` is what a turn of an entry costs."""

    def __init__(
        self, limit: int, per_client: int, age_s: float = AGE_S, share: Callable[[W], float] = lambda _: 1
    ) -> None:
        if limit < 1 or per_client < 1:
            raise ValueError("a queue needs room for at least one")
        self._limit = limit
        self._per_client = per_client
        self._age_s = age_s
        self._share = share
        self._entries: dict[int, W] = {}
        self._flows: dict[tuple[int, str], _Flow[W]] = {}
        self._clients: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[W]:
        return iter(self._entries.values())

    def __contains__(self, id_: int) -> bool:
        return id_ in self._entries

    @property
    def earliest(self) -> float:
        """The first deadline; infinity without any."""
        return min([flow.entries[0].deadline for flow in self._flows.values()], default=math.inf)

    def resize(self, limit: int, per_client: int) -> None:
        """Have room for more or fewer from now on; who waits goes on waiting."""
        self._limit, self._per_client = limit, per_client

    def full(self, client: str) -> Refused | None:
        """Why one more of the client cannot wait; None when it can."""
        if self._clients.get(client, 0) >= self._per_client:
            return Refused(
                Reason.CLIENT_QUEUE_FULL,
                f"{self._per_client} requests of this client are waiting, as many as may of one",
            )
        if len(self._entries) >= self._limit:
            return Refused(Reason.QUEUE_FULL, f"the queue is full: {self._limit} are waiting")
        return None

    def add(self, entry: W) -> None:
        """Put it in, whether or not the queue is full."""
        if entry.id in self._entries:
            raise ValueError(f"request {entry.id} is queued already")
        self._entries[entry.id] = entry
        self._clients[entry.client] = self._clients.get(entry.client, 0) + 1
        flow = self._flows.get(_flow_of(entry))
        if flow is None:
            self._flows[_flow_of(entry)] = _Flow(self._least(_priority(entry)), [entry])
        elif _urgency(flow.entries[-1]) < _urgency(entry):
            flow.entries.append(entry)
        else:
            insort(flow.entries, entry, key=_urgency)

    def remove(self, id_: int) -> W | None:
        """Take an entry out that was not served; None when it is not there."""
        entry = self._entries.pop(id_, None)
        if entry is not None:
            self._take(entry, self._flows[_flow_of(entry)])
        return entry

    def serve(self, entry: W) -> None:
        """Take an entry out that is served now: its client's next turn is later by that."""
        del self._entries[entry.id]
        flow = self._flows[_flow_of(entry)]
        flow.served += self._share(entry)
        self._take(entry, flow)

    def _take(self, entry: W, flow: _Flow[W]) -> None:
        left = self._clients[entry.client] - 1
        if left:
            self._clients[entry.client] = left
        else:
            del self._clients[entry.client]
        entries = flow.entries
        if len(entries) == 1:
            del self._flows[_flow_of(entry)]
        elif entries[0] is entry:
            del entries[0]
        else:
            del entries[bisect_left(entries, _urgency(entry), key=_urgency)]

    def level(self, entry: Waiting, now: float) -> int:
        """Its priority, halved for every `age_s` of waiting; 0 goes before all others."""
        priority = entry.priority or DEFAULT_PRIORITY
        waited = now - entry.arrived
        return priority if waited < self._age_s else priority >> int(min(waited / self._age_s, 8))

    def ordered(self, now: float) -> list[W]:
        """All entries, the next first."""
        return [entry for _, entry in self.ranked(now)]

    def ranked(self, now: float) -> list[tuple[Rank, W]]:
        """All entries with their ranks, the next first."""
        ranked = self._ranked(now)
        # No two ranks are equal, so entries are never compared.
        ranked.sort()
        return ranked

    def around(self, entry: Waiting, now: float) -> tuple[list[W], list[W]]:
        """Those that would go before `entry`, were it put in now, and those that would go after it; both in order."""
        turn = 0.0
        if flow := self._flows.get(_flow_of(entry)):
            turn = flow.served - self._least(_priority(entry))
            sooner = bisect_left(flow.entries, _urgency(entry), key=_urgency)
            turn += sum([self._share(other) for other in flow.entries[:sooner]])
        rank = self._rank(entry, turn, now)
        ranked = self.ranked(now)
        count = bisect_left(ranked, rank, key=itemgetter(0))
        others = [other for _, other in ranked]
        return others[:count], others[count:]

    def is_last(self, entry: Waiting, now: float) -> bool:
        """Whether all others would certainly go before `entry`, were it put in now; mostly seen without ranking them:
        they are of the same client and priority, and more urgent."""
        flow = self._flows.get(_flow_of(entry))
        if flow is None or len(self._flows) > 1 or self.level(entry, now) != _priority(entry):
            return False
        return _urgency(flow.entries[-1]) < _urgency(entry)

    def _ranked(self, now: float) -> list[tuple[Rank, W]]:
        least: dict[int, float] = {}
        for (priority, _), flow in self._flows.items():
            least[priority] = min(least.get(priority, flow.served), flow.served)
        ranked: list[tuple[Rank, W]] = []
        share, young = self._share, now - self._age_s
        for (priority, _), flow in self._flows.items():
            turn = flow.served - least[priority]
            for entry in flow.entries:
                if entry.arrived > young:
                    ranked.append(((priority, turn, entry.deadline, entry.id), entry))
                else:
                    ranked.append((self._rank(entry, turn, now), entry))
                turn += share(entry)
        return ranked

    def _rank(self, entry: Waiting, turn: float, now: float) -> Rank:
        level = self.level(entry, now)
        return (level, turn, entry.deadline, entry.id) if level else (0, 0.0, entry.arrived, entry.id)

    def _least(self, priority: int) -> float:
        return min([flow.served for (each, _), flow in self._flows.items() if each == priority], default=0.0)


def _priority(entry: Waiting) -> int:
    return entry.priority or DEFAULT_PRIORITY


def _flow_of(entry: Waiting) -> tuple[int, str]:
    return _priority(entry), entry.client


def _urgency(entry: Waiting) -> tuple[float, int]:
    return entry.deadline, entry.id
