"""What became of the requests: pure accounting, with the times given.

A request's latency counts from when it was due, not from when a connection was free for it: with the latter a server
that stands still for a second would be charged for the few requests that it held, and not for all those that could not
be sent meanwhile (Tene's "coordinated omission").
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from agent.load.histogram import Histogram

# Messages beyond that many different ones are counted together.
_MAX_FAILURES = 32
_MAX_MESSAGE_CHARACTERS = 80
OTHER = "other reasons"
SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request from its due time to its end, in seconds of one clock.

    `began` is when it went out, or was given up. `was_ready`: a connection was free when it was due, so what passed
    until it began is the generator's own lateness; otherwise it waited for a connection. `failure` is "" for an answer
    of status 200. `given_up`: nothing came in time, so its latency is the least that it can have been.
    """

    trace: str
    due: float
    began: float
    ended: float
    was_ready: bool
    failure: str = ""
    given_up: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0


class Tally:
    """Counts of one kind of request at one rate, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.requests = 0
        self.answered = 0
        self.in_time = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.failures: Counter[str] = Counter()
        self.latency = Histogram()
        self.lateness = Histogram()
        self.waiting = Histogram()
        self.slowest: list[tuple[float, str]] = []

    def add(self, outcome: Outcome, deadline_s: float | None) -> None:
        """Count one request."""
        latency = max(outcome.ended - outcome.due, 0.0)
        delay = _nanoseconds(outcome.began - outcome.due)
        self.requests += 1
        self.sent_bytes += outcome.sent_bytes
        self.received_bytes += outcome.received_bytes
        (self.lateness if outcome.was_ready else self.waiting).record(delay)
        if not outcome.failure:
            self.answered += 1
            self.in_time += deadline_s is None or latency <= deadline_s
        else:
            known = outcome.failure in self.failures or len(self.failures) < _MAX_FAILURES
            self.failures[outcome.failure if known else OTHER] += 1
        if not outcome.failure or outcome.given_up:
            self.latency.record(_nanoseconds(latency))
            keep = heapq.heappush if len(self.slowest) < SLOWEST else heapq.heappushpop
            keep(self.slowest, (latency, outcome.trace))

    def merge(self, other: Tally) -> None:
        """Count all that the other has counted."""
        self.requests += other.requests
        self.answered += other.answered
        self.in_time += other.in_time
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        for failure, count in other.failures.items():
            known = failure in self.failures or len(self.failures) < _MAX_FAILURES
            self.failures[failure if known else OTHER] += count
        for mine, others in (
            (self.latency, other.latency), (self.lateness, other.lateness), (self.waiting, other.waiting),
        ):  # fmt: skip
            mine.merge(others)
        # Ascending, which is a heap.
        self.slowest = heapq.nlargest(SLOWEST, self.slowest + other.slowest)[::-1]

    @property
    def unanswered(self) -> int:
        """Requests that were refused or lost, which have no latency."""
        return self.requests - self.latency.count

    def quantile_s(self, share: float) -> float | None:
        """The latency that `share` of all requests kept, in seconds; what was refused or failed never did."""
        value = self.latency.quantile(share, beyond=self.unanswered)
        return None if value is None else value / 1e9


@dataclass
class Measured:
    """One rate, as it was measured: a tally per kind.

    Times are seconds since offset 0 was due; `end_s` is when the last answer came, or the stop. `cpu_share` is what the
    generator took of one core, and `lag` how late it was for ticks of its own, warm-up included: that is seen also
    while every connection is busy. `cut_off` requests were due, but not answered yet, at the stop.
    """

    tallies: list[Tally]
    lag: Histogram = field(default_factory=Histogram)
    end_s: float = 0.0
    last_offset_s: float = 0.0
    cpu_share: float = 0.0
    cut_off: int = 0
    stopped: bool = False


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


class _Error(msgspec.Struct):
    error: str


def failure_of(status: int, body: bytes) -> str:
    """The class of an answer that is not 200: its status and the server's message with the numbers taken out, so that
    two refusals that differ in a number alone are of one class."""
    try:
        message = msgspec.json.decode(body, type=_Error).error
    except msgspec.DecodeError:
        return f"{status} without a message"
    line = " ".join(re.sub(r"\d[\d.,]*", "N", message).split())
    shown = "".join(c if c.isprintable() else "?" for c in line)
    if len(shown) > _MAX_MESSAGE_CHARACTERS:
        shown = shown[: _MAX_MESSAGE_CHARACTERS - 3] + "..."
    return f"{status} {shown}"
