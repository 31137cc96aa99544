"""Callers that wait for a slot: ordered as requests are, bounded, fair between clients."""

from __future__ import annotations

from typing import Generic

from agent.request import Refused
from agent.scheduling.queue import EXPIRED, Queue, W


class Door(Generic[W]):
    """At most `limit` wait, at most `per_client` of one client.

    Whoever drives it calls `expire` not later than `next_wakeup`, and answers whom it returns.
    """

    def __init__(self, limit: int, per_client: int) -> None:
        self._queue: Queue[W] = Queue(limit, per_client)

    def __len__(self) -> int:
        return len(self._queue)

    def resize(self, limit: int, per_client: int) -> None:
        """Have room for more or fewer from now on; who waits goes on waiting."""
        self._queue.resize(limit, per_client)

    def submit(self, caller: W, now: float) -> Refused | None:
        """Let it wait, or say why not."""
        if caller.deadline <= now:
            return EXPIRED
        refused = self._queue.full(caller.client)
        if refused is None:
            self._queue.add(caller)
        return refused

    def first(self, now: float) -> W | None:
        """Who gets the next slot that is free; those past their deadline stay for `expire`."""
        return next((caller for caller in self._queue.ordered(now) if caller.deadline > now), None)

    def next(self, now: float) -> W | None:
        """Take out the first."""
        caller = self.first(now)
        if caller is not None:
            self._queue.serve(caller)
        return caller

    def before(self, caller: W, now: float) -> int:
        """How many would get a slot before this one."""
        return len(self._queue.around(caller, now)[0])

    def expire(self, now: float) -> list[W]:
        """Take out every caller whose deadline has come; each must be answered."""
        late = [caller for caller in self._queue if caller.deadline <= now]
        for caller in late:
            self._queue.remove(caller.id)
        return late

    def next_wakeup(self) -> float | None:
        """When `expire` must be called at the latest; None while nobody waits."""
        return min((caller.deadline for caller in self._queue), default=None)

    def cancel(self, id_: int) -> bool:
        """Forget a caller; False when it does not (or no longer) wait."""
        return self._queue.remove(id_) is not None
