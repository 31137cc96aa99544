"""How much may be on its way to the broker at once, and what its answers mean. Pure.

The library below keeps whatever it is given, without bound, and sends it whatever the broker said (its receive maximum
is ignored). So it is given no more than may be on the wire: what is here goes in through the gate, and comes out when
the broker answered, when a message of QoS 0 was written, or when the connection ends. What was inside then was not
delivered, and is sent again.

Some messages no broker answers: it ends the connection, and would do so for ever. It does not say which one it was, so
that after such an end those that were on their way go one by one, and one with which it ends again and again is given
up.

Three lanes go through it: `FIRST` is what begins a connection, then what happens now, and then what happened before,
which is held to a rate: a vehicle back from hours without a network still tells of now first.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from agent.mqtt.packet import Outgoing, packet_bytes

# A broker may end a connection for its own reasons, twice; not three times with the same message alone on its way.
_MOST_ENDS = 3

# What a broker may ask of this field at most, and what holds where it says nothing (MQTT 5.0, section 3.2.2.3.3).
NO_MAXIMUM = 65_535


class Lane(enum.Enum):
    """In the order in which they go."""

    FIRST = "first"
    LIVE = "live"
    REPLAY = "replay"


class Fate(enum.Enum):
    """What becomes of a message by the broker's answer."""

    DELIVERED = "delivered"
    LATER = "later"
    NEVER = "never"


class Answer(NamedTuple):
    """`reason` stands in gap records and metrics. `tries`: after so many in a row of LATER it is NEVER; 0: no matter
    how many."""

    fate: Fate
    reason: str
    tries: int = 0


# MQTT 5.0, section 3.4.2.1. That nobody listens is no reason to say it again. A quota is over some time; an error that
# the broker does not name may be of this message, which then must not keep all others waiting for ever.
ANSWERS: dict[int, Answer] = {
    0x00: Answer(Fate.DELIVERED, "success"),
    0x10: Answer(Fate.DELIVERED, "no_subscribers"),
    0x80: Answer(Fate.LATER, "unspecified", 5),
    0x83: Answer(Fate.LATER, "broker_error", 5),
    0x87: Answer(Fate.NEVER, "not_authorized"),
    0x90: Answer(Fate.NEVER, "topic_invalid"),
    0x91: Answer(Fate.LATER, "id_in_use", 5),
    0x95: Answer(Fate.NEVER, "too_large"),
    0x97: Answer(Fate.LATER, "quota"),
    0x99: Answer(Fate.NEVER, "payload_invalid"),
}
_UNKNOWN = Answer(Fate.LATER, "unknown", 5)


def answer_of(code: int) -> Answer:
    """Of a code that no PUBACK may have, as of an error that has no name; all below 0x80 are successes."""
    return ANSWERS.get(code, ANSWERS[0x00] if code < 0x80 else _UNKNOWN)


@dataclass(frozen=True)
class Limits:
    """What the broker said when the connection began, and the protocol that is spoken (4: 3.1.1)."""

    protocol: int = 5
    receive_maximum: int = NO_MAXIMUM
    maximum_packet: int = 0
    maximum_qos: int = 2
    retains: bool = True
    keepalive_s: int = 0
    topic_aliases: int = 0


@dataclass(frozen=True)
class Options:
    """Our own side of it. At most `window` messages and `window_bytes` are inside, and one at least. `replay_per_s`
    of the past go in a second, after `replay_burst` at once; 0: any number. The oldest inside may be there for
    `stuck_s`. What the broker puts off is tried again after `later_s`."""

    window: int = 64
    window_bytes: int = 1 << 20
    message_bytes: int = 128 << 10
    replay_per_s: float = 200.0
    replay_burst: int = 50
    stuck_s: float = 30.0
    later_s: float = 5.0


class Inside(NamedTuple):
    """One that was let in."""

    lane: Lane
    position: int
    size: int
    since: float


class Settled(NamedTuple):
    """One that came out, and what becomes of it."""

    lane: Lane
    position: int
    fate: Fate
    reason: str


class Gate:
    """`now` is monotonic throughout. A position is of one lane: the same number may be in two."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.limits = Limits()
        self._inside: dict[int, Inside] = {}
        self._bytes = 0
        self._tokens, self._filled = float(options.replay_burst), 0.0
        self._closed_until = dict.fromkeys(Lane, 0.0)
        self._tries: dict[tuple[Lane, int], int] = {}
        self._next = 0
        self._careful = 0

    @property
    def inside(self) -> int:
        """How many are on their way."""
        return len(self._inside)

    @property
    def inside_bytes(self) -> int:
        """Their packets together."""
        return self._bytes

    def opened(self, limits: Limits, now: float) -> None:
        """A connection began, with nothing on its way."""
        self.limits = limits
        self._inside.clear()
        self._bytes = 0
        self._closed_until = dict.fromkeys(Lane, now)
        self._filled = max(self._filled, now)

    def closed(self, blamed: bool = False) -> list[Settled]:
        """The connection ended: what was on its way, in the order in which it went in, is LATER; `blamed` says that it
        ended for something that we sent."""
        lost = list(self._inside.values())
        self._inside.clear()
        self._bytes = 0
        if not blamed or not lost:
            return [Settled(each.lane, each.position, Fate.LATER, "ended") for each in lost]
        self._careful = max(self._careful, len(lost))
        (first, *others) = lost
        if others:
            return [Settled(each.lane, each.position, Fate.LATER, "ended") for each in lost]
        key = first.lane, first.position
        ends = self._tries.pop(key, 0) + 1
        if ends == _MOST_ENDS:
            return [Settled(*key, Fate.NEVER, "broker_ends")]
        self._remember(key, ends)
        return [Settled(*key, Fate.LATER, "ended")]

    def fits(self, message: Outgoing) -> bool:
        """Whether the broker, and our own bound, take a message of that size at all."""
        most = self.limits.maximum_packet
        return len(message.payload) <= self._options.message_bytes and not (
            most and packet_bytes(message, self.limits.protocol) > most
        )

    def room(self, lane: Lane, now: float) -> int:
        """How many of that lane may go in now."""
        if now < self._closed_until[lane] or (self._bytes >= self._options.window_bytes and self._inside):
            return 0
        window = 1 if self._careful else self._options.window
        room = min(window, self.limits.receive_maximum) - len(self._inside)
        if lane is Lane.REPLAY and self._options.replay_per_s:
            self._fill(now)
            room = min(room, int(self._tokens))
        return max(0, room)

    def enter(self, lane: Lane, position: int, message: Outgoing, now: float) -> int | None:
        """Let one in where there is `room`: the ticket under which it comes out again. None: its bytes have to wait."""
        size = packet_bytes(message, self.limits.protocol)
        if self._inside and self._bytes + size > self._options.window_bytes:
            return None
        if lane is Lane.REPLAY and self._options.replay_per_s:
            self._tokens -= 1
        ticket, self._next = self._next, self._next + 1
        self._inside[ticket] = Inside(lane, position, size, now)
        self._bytes += size
        return ticket

    def settle(self, ticket: int, code: int, now: float) -> Settled | None:
        """The broker answered, or a message of QoS 0 was written. None: of a connection that is over, or told twice."""
        found = self._inside.pop(ticket, None)
        if found is None:
            return None
        self._bytes -= found.size
        self._careful = max(0, self._careful - 1)
        answer, key = answer_of(code), (found.lane, found.position)
        if answer.fate is not Fate.LATER:
            self._tries.pop(key, None)
            return Settled(found.lane, found.position, answer.fate, answer.reason)
        tries = self._tries.pop(key, 0) + 1
        if tries == answer.tries:
            return Settled(found.lane, found.position, Fate.NEVER, answer.reason)
        self._remember(key, tries)
        # All of the lane waits: what is behind it would only overtake it.
        self._closed_until[found.lane] = now + self._options.later_s
        return Settled(found.lane, found.position, Fate.LATER, answer.reason)

    def stuck(self, now: float) -> bool:
        """Whether the oldest on its way is there for so long that the connection is good for nothing."""
        oldest = next(iter(self._inside.values()), None)
        return oldest is not None and now - oldest.since >= self._options.stuck_s

    def wakeup(self, now: float) -> float:
        """At the latest then it is worth to look again, though nothing else happened."""
        times = [until for until in self._closed_until.values() if until > now]
        if self._inside:
            times.append(next(iter(self._inside.values())).since + self._options.stuck_s)
        if self._options.replay_per_s and self._tokens < 1:
            times.append(self._filled + (1 - self._tokens) / self._options.replay_per_s)
        return min(times, default=now + self._options.stuck_s)

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._filled)
        self._tokens = min(float(self._options.replay_burst), self._tokens + passed * self._options.replay_per_s)
        self._filled = max(self._filled, now)

    def _remember(self, key: tuple[Lane, int], tries: int) -> None:
        # No more can be counted at once than are inside, but for those whose connection ended meanwhile.
        while len(self._tries) >= 4 * self._options.window:
            del self._tries[next(iter(self._tries))]
        self._tries[key] = tries
