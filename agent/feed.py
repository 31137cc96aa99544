"""Results that can be waited for: `agent.results` in an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from agent.bell import Bell
from agent.results import Closed, Kept, Missed, Policy, Position, Reader, Results

T = TypeVar("T")
# How far a reader that wants the latest may be behind before what it has not is skipped.
_BACKLOG = 16


class Follower(Generic[T]):
    """Somebody who follows a feed: `take` what there is, and `wait` when there is nothing."""

    def __init__(self, feed: Feed[T], reader: Reader) -> None:
        self._feed, self._reader = feed, reader
        self._bell = Bell()
        self.ring = self._bell.ring

    @property
    def last(self) -> int:
        """The number of the last result that it has, or was told it missed."""
        return self._reader.next - 1

    def take(self) -> Kept[T] | Missed | Closed | None:
        """What comes next, as `Results.take` gives it."""
        return self._feed.take(self._reader)

    async def wait(self, seconds: float) -> None:
        """Until there may be something, at most so long."""
        await self._bell.wait(seconds)

    def close(self) -> None:
        """Follow no more."""
        self._feed.forget(self, self._reader)


class Feed(Generic[T]):
    """The newest results, and those who follow them. `clock` gives the time, in seconds."""

    def __init__(self, results: Results[T], clock: Callable[[], float]) -> None:
        self.results = results
        self._clock = clock
        self._followers: set[Follower[T]] = set()
        self._waiting: list[Bell] = []
        """Who has a result that a reader keeps from being appended, in turn."""

    def follow(self, policy: Policy, since: Position | None, backlog: int = _BACKLOG) -> Follower[T]:
        """Begin to follow it, behind `since` or with what comes next. Whoever does must `close` it."""
        # Who comes back may be as far behind as all that is kept.
        backlog = backlog if since is None else max(len(self.results), backlog)
        follower = Follower(self, self.results.subscribe(policy, self._clock(), since, backlog))
        self._followers.add(follower)
        return follower

    def take(self, reader: Reader) -> Kept[T] | Missed | Closed | None:
        """What comes next for the reader."""
        taken = self.results.take(reader, self._clock())
        self._make_room()
        return taken

    def forget(self, follower: Follower[T], reader: Reader) -> None:
        """The reader is gone."""
        self._followers.discard(follower)
        self.results.unsubscribe(reader)
        self._make_room()

    def put(self, value: T, nbytes: int) -> bool:
        """Append a result, unless somebody who blocks keeps it from that."""
        if self.results.append(value, nbytes, self._clock()) is None:
            return False
        self.ring()
        return True

    async def put_when_possible(self, value: T, nbytes: int) -> None:
        """Append a result, behind those that already wait for that."""
        if not self._waiting and self.put(value, nbytes):
            return
        bell = Bell()
        self._waiting.append(bell)
        try:
            while self._waiting[0] is not bell:
                await bell.wait()
            while not self.put(value, nbytes):
                wakeup = self.results.wakeup()
                await bell.wait(None if wakeup is None else wakeup - self._clock())
        finally:
            self._waiting.remove(bell)
            self._make_room()

    def ring(self) -> None:
        """Have all who follow it look again."""
        for follower in self._followers:
            follower.ring()

    def _make_room(self) -> None:
        if self._waiting:
            self._waiting[0].ring()
