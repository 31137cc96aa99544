"""After how long to try again, by why it failed. Pure.

Full jitter (Brooker, "Exponential Backoff and Jitter"): a fleet that lost its broker at once must not come back at
once. A connection resets it only when it held: two clients of one name, or a broker that falls over its guests, would
else be asked for a connection every second for ever. What waiting does not mend, and a person has to, is asked for
slowly, and never at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Trouble(enum.Enum):
    """Why there is no connection, by what to do about it. The value stands in metrics and logs."""

    NETWORK = "network"
    REFUSED = "refused"
    STUCK = "stuck"
    CLOSED = "closed"
    PROTOCOL = "protocol"
    REJECTED = "rejected"
    AUTHENTICATION = "authentication"
    CERTIFICATE = "certificate"
    TAKEN_OVER = "taken_over"
    RATE = "rate"
    MOVED = "moved"


# It may be for something that we sent: the broker says so, or says nothing, or something that we do not understand.
BLAMED = frozenset((Trouble.CLOSED, Trouble.PROTOCOL, Trouble.REJECTED))
SLOW = frozenset((Trouble.AUTHENTICATION, Trouble.CERTIFICATE, Trouble.TAKEN_OVER, Trouble.RATE))

# MQTT 5.0, section 2.4: of CONNACK and DISCONNECT. All others are the broker's own troubles, which pass.
_TROUBLES = {
    0x81: Trouble.REJECTED,
    0x82: Trouble.REJECTED,
    0x84: Trouble.PROTOCOL,
    0x85: Trouble.AUTHENTICATION,
    0x86: Trouble.AUTHENTICATION,
    0x87: Trouble.AUTHENTICATION,
    0x8A: Trouble.AUTHENTICATION,
    0x8C: Trouble.AUTHENTICATION,
    0x8E: Trouble.TAKEN_OVER,
    0x90: Trouble.REJECTED,
    0x93: Trouble.REJECTED,
    0x94: Trouble.REJECTED,
    0x95: Trouble.REJECTED,
    0x96: Trouble.RATE,
    0x97: Trouble.RATE,
    0x99: Trouble.REJECTED,
    0x9A: Trouble.REJECTED,
    0x9B: Trouble.REJECTED,
    0x9C: Trouble.MOVED,
    0x9D: Trouble.MOVED,
    0x9F: Trouble.RATE,
}


def trouble_of(code: int) -> Trouble:
    """Of the reason code with which a broker refused or ended a connection."""
    return _TROUBLES.get(code, Trouble.REFUSED)


@dataclass(frozen=True)
class Waits:
    """In seconds. A connection that held for `stable_s` was a good one."""

    first_s: float = 1.0
    most_s: float = 300.0
    slow_first_s: float = 30.0
    slow_most_s: float = 900.0
    stable_s: float = 120.0


class Backoff:
    """`draw` gives a number from 0 to 1.

    Before MQTT 5, and with brokers that do not say it, that another client has our name is seen only by how connections
    end: by the broker, soon, and time after time. After `MOST_SHORT` of those it `flaps`, and is tried slowly.
    """

    MOST_SHORT = 5

    def __init__(self, waits: Waits, draw: Callable[[], float]) -> None:
        self._waits, self._draw = waits, draw
        self._failures = 0
        self._slow_failures = 0
        self._connected: float | None = None
        self._short = 0

    @property
    def flaps(self) -> bool:
        """Whether the broker lets us in, and ends it soon, each time."""
        return self._short >= self.MOST_SHORT

    @property
    def failures(self) -> int:
        """How many in a row, since one connection held."""
        return self._failures

    def connected(self, now: float) -> None:
        """A connection began."""
        self._connected = now

    def failed(self, trouble: Trouble, now: float) -> float:
        """It ended, or none began: after how many seconds to try again."""
        if self._connected is not None and now - self._connected >= self._waits.stable_s:
            self._failures = self._slow_failures = self._short = 0
        elif self._connected is not None and trouble is Trouble.CLOSED:
            self._short += 1
        self._connected = None
        self._failures += 1
        if trouble in SLOW or self.flaps:
            self._slow_failures += 1
            most = _doubled(self._waits.slow_first_s, self._slow_failures, self._waits.slow_most_s)
            # Never before the half of it, for a broker that counts.
            return most * (0.5 + 0.5 * self._draw())
        return _doubled(self._waits.first_s, self._failures, self._waits.most_s) * self._draw()


def _doubled(first_s: float, times: int, most_s: float) -> float:
    # Beyond 2^64 nothing is doubled any more: floats end, and `most_s` was met long before.
    return min(most_s, first_s * 2.0 ** min(times - 1, 64))
