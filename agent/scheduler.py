"""Decides what runs next. Pure: time is an argument, and nothing here waits.

Theory of operation: what is submitted stands in one bounded queue, first come first served. Whoever drives it calls
`expire` not later than `next_wakeup` and answers what it returns, so a deadline is kept by a timer and not by the
next request that happens to come. The same class queues requests for the engine and callers for a free slot.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from agent.errors import Reason
from agent.request import Refused


class Timed(Protocol):
    """What can be queued: known by a number, worthless after its deadline (monotonic seconds)."""

    @property
    def id(self) -> int: ...

    @property
    def deadline(self) -> float: ...


T = TypeVar("T", bound=Timed)

EXPIRED = Refused(Reason.DEADLINE, "the deadline passed before the answer was there")


class Scheduler(Generic[T]):
    """A first-in-first-out queue of at most `limit` entries that never hands out one past its deadline."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("a queue needs room for at least one")
        self._limit = limit
        self._queue: OrderedDict[int, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, entry: T, now: float) -> Refused | None:
        """Queue it, or say why not."""
        if entry.deadline <= now:
            return EXPIRED
        if len(self._queue) >= self._limit:
            return Refused(Reason.QUEUE_FULL, f"the queue is full: {self._limit} are waiting")
        self._queue[entry.id] = entry
        return None

    def next(self, now: float) -> T | None:
        """Take the entry to run now; entries past their deadline stay for `expire`."""
        for entry in self._queue.values():
            if entry.deadline > now:
                return self._queue.pop(entry.id)
        return None

    def take(self, most: int, now: float) -> list[T]:
        """Take up to `most` entries to run together now, in their order."""
        taken: list[T] = []
        while len(taken) < most and (entry := self.next(now)) is not None:
            taken.append(entry)
        return taken

    def expire(self, now: float) -> list[T]:
        """Take out every entry whose deadline has come; each must be answered."""
        late = [entry for entry in self._queue.values() if entry.deadline <= now]
        for entry in late:
            del self._queue[entry.id]
        return late

    def next_wakeup(self) -> float | None:
        """When `expire` must be called at the latest; None while nothing waits."""
        return min((entry.deadline for entry in self._queue.values()), default=None)

    def cancel(self, id: int) -> bool:  # noqa: A002 - the field's own name
        """Forget an entry; False when it is not (or no longer) queued."""
        return self._queue.pop(id, None) is not None


PATIENCE = 0.1
"""How long a pass waits for company, in parts of what the last one took: that much is lost where nobody comes, and half
of a pass is won where one does."""


class Gathering:
    """When a pass that up to `most` requests can share begins. Pure.

    Theory of operation. Requests that come together are not ready at the same instant. Were the first to start at once
    it would be alone, and so the second, whose turn it is when the first has gone to fetch the next: two that ask in
    turn would never meet. So a pass waits a little for those that are on their way, which hold a slot already, and for
    those that had company before and are likely to ask again. Who comes alone does not wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._patience_s = 0.0
        self._company_until = 0.0
        self._since: float | None = None

    def begins_at(self, ready: int, coming: int, now: float) -> float | None:
        """When a pass of the `ready` begins, at once if not after `now`, while `coming` hold slots that are not filled
        yet; None without any. To be asked again whenever either number changes, while no pass goes on."""
        if not ready:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if ready >= self._most:
            return now
        return max(self._since + self._patience_s if coming else now, self._company_until)

    def ended(self, requests: int, waiting: int, took_s: float, now: float) -> None:
        """A pass of so many requests is over, and others wait."""
        self._patience_s = PATIENCE * took_s
        self._company_until = now + self._patience_s if requests + waiting > 1 else now
        self._since = None
