"""Results of a model, kept for those who subscribe to them. Pure: time is an argument, and nothing waits.

Theory of operation. Every result has a number, from 1 on, and the newest ones stay, as many as bytes and entries allow.
A reader is a number: the next result that it gets. So readers cost nothing, may begin in the past, and share what is
kept. What a reader missed is said to it in the place where it would have come; numbers that come and numbers that are
lost make one sequence without gaps. How a reader that is slower than the results is treated, it chooses:

    latest   it gets the newest few, and is told how many it missed
    close    it gets everything until something it did not get is gone; then it is told so, and that is the end
    block    nothing that it did not get goes: `append` refuses meanwhile. If it takes nothing for `patience_s`, it is
             closed

Numbers begin anew with every start, so a position is a number and an epoch: who comes back with a position of another
epoch gets all that is kept, and is told that there was a restart.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from targets.errors import ContractError

T = TypeVar("T")

# What Python keeps beside the bytes of a result: entry, numbers, a place in the queue.
ENTRY_BYTES = 256
_POSITION = re.compile(r"(?:([0-9A-Za-z]{1,32})-)?([0-9]{1,18})")


class Policy(str, enum.Enum):
    """What becomes of a reader that is slower than the results."""

    LATEST = "latest"
    CLOSE = "close"
    BLOCK = "block"


class Position(NamedTuple):
    """The last result that a reader has, and the start of the agent that numbered it, empty where it does not say."""

    epoch: str
    seq: int


def parse_position(text: str) -> Position:
    """Of `17` or `5f3a-17`, as in a query's `since` and in Last-Event-ID. Raises ContractError."""
    found = _POSITION.fullmatch(text.strip()) if text.isascii() else None
    if found is None:
        raise ContractError(f"there is no result {text[:40]!r}", "give the id or the seq of the last one received")
    return Position(found[1] or "", int(found[2]))


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """A result, and its number."""

    seq: int
    value: T


class Missed(NamedTuple):
    """Results `first` to `last` will not come: `last` is `first` - 1 where only a restart is to be told of."""

    first: int
    last: int
    restarted: bool = False


class Closed(NamedTuple):
    """The reader was too slow; `since` is the number of the last that it got, or was told it missed."""

    since: int


@dataclass(eq=False, slots=True)
class Reader:
    """A subscription, as `Results.subscribe` gives it. `next` is the result that it gets next."""

    policy: Policy
    backlog: int
    next: int
    waits_since: float
    """When it last took something, or when something came that it could take."""
    missed: Missed | None = None
    closed: bool = False
    lost: int = 0
    """How many results it missed so far."""


class Results(Generic[T]):
    """The newest results: at most `limit_bytes` and `limit_entries`. `epoch` is another at every start of the agent."""

    def __init__(self, epoch: str, limit_bytes: int, limit_entries: int, patience_s: float) -> None:
        self.epoch = epoch
        self.limit_bytes = limit_bytes
        self.limit_entries = limit_entries
        self.patience_s = patience_s
        self.nbytes = 0
        self.newest = 0
        self._entries: deque[tuple[T, int]] = deque()
        self._readers: set[Reader] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest(self) -> int:
        """The oldest result that is kept; `newest` + 1 where there is none."""
        return self.newest + 1 - len(self._entries)

    @property
    def readers(self) -> int:
        return len(self._readers)

    def append(self, value: T, nbytes: int, now: float) -> int | None:
        """Number the result and keep it, or None: a reader that blocks has not taken what would have to go. Then it is
        worth another try when one took something, and at `wakeup()`.

        Raises ValueError for a result that alone is more than the limit.
        """
        nbytes += ENTRY_BYTES
        if nbytes > self.limit_bytes:
            raise ValueError(f"a result of {nbytes} bytes, and room for {self.limit_bytes}")
        oldest = self.newest + 1 - self._staying(nbytes)
        in_the_way = [r for r in self._readers if r.policy is Policy.BLOCK and not r.closed and r.next < oldest]
        for reader in in_the_way:
            reader.closed = now - reader.waits_since >= self.patience_s
        if not all(reader.closed for reader in in_the_way):
            return None
        while self.oldest < oldest:
            self.nbytes -= self._entries.popleft()[1]
        self._entries.append((value, nbytes))
        self.nbytes += nbytes
        self.newest += 1
        for reader in self._readers:
            if reader.next == self.newest:
                reader.waits_since = now
            if reader.policy is Policy.CLOSE and reader.next < oldest:
                reader.closed = True
        return self.newest

    def _staying(self, nbytes: int) -> int:
        """How many entries can stay beside one of that many bytes."""
        count, total = len(self._entries), self.nbytes
        for _, size in self._entries:
            if total + nbytes <= self.limit_bytes and count < self.limit_entries:
                break
            count, total = count - 1, total - size
        return count

    def wakeup(self) -> float | None:
        """When the first reader that blocks will have lost all patience with it; None where nobody does."""
        waiting = [
            reader.waits_since
            for reader in self._readers
            if reader.policy is Policy.BLOCK and not reader.closed and reader.next <= self.newest
        ]
        return min(waiting) + self.patience_s if waiting else None

    def subscribe(self, policy: Policy, now: float, since: Position | None = None, backlog: int = 16) -> Reader:
        """Begin behind `since`, or with the next result. `backlog` is how many a reader with LATEST may be behind."""
        reader = Reader(policy, backlog, self.newest + 1, now)
        if since is not None:
            restarted = since.seq > self.newest or since.epoch not in ("", self.epoch)
            first = 1 if restarted else since.seq + 1
            reader.next = max(first, self.oldest)
            if restarted or first < self.oldest:
                self._miss(reader, first, restarted)
        self._readers.add(reader)
        return reader

    def unsubscribe(self, reader: Reader) -> None:
        """Forget the reader."""
        self._readers.discard(reader)

    def take(self, reader: Reader, now: float) -> Kept[T] | Missed | Closed | None:
        """What comes next for the reader, or None: it has everything. After Closed nothing comes."""
        reader.waits_since = now
        if reader.missed is not None:
            missed, reader.missed = reader.missed, None
            return missed
        if reader.closed:
            return Closed(reader.next - 1)
        if reader.next > self.newest:
            return None
        if reader.policy is Policy.LATEST:
            first = max(self.oldest, self.newest + 1 - reader.backlog)
            if reader.next < first:
                behind, reader.next = reader.next, first
                self._miss(reader, behind)
                return self.take(reader, now)
        value = self._entries[reader.next - self.oldest][0]
        reader.next += 1
        return Kept(reader.next - 1, value)

    def _miss(self, reader: Reader, first: int, restarted: bool = False) -> None:
        """Note for the reader that it missed what is from `first` to before its next."""
        reader.missed = Missed(first, reader.next - 1, restarted)
        reader.lost += reader.next - first
