"""What a link to a broker needs around it in tests: messages in memory, and somebody who listens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from agent.mqtt.link import Connected, Link, Lost
from agent.mqtt.packet import Incoming, Outgoing, Properties
from agent.mqtt.settings import Mqtt

STATE = "edge/v1/d1/agent/state/agent"
MEASURE = "edge/v1/d1/agent/m/x"


class Entry(NamedTuple):
    position: int
    topic: str
    payload: bytes
    qos: int


class Memory:
    """A source that keeps what it gets, and knows what became of it."""

    def __init__(self) -> None:
        self.waiting: dict[int, Entry] = {}
        self.delivered_at: list[int] = []
        self.rejections: dict[int, str] = {}
        self._count, self._past = 0, -1

    def add(self, payload: bytes | int, topic: str = MEASURE, qos: int = 1) -> int:
        """One more; a number is its payload in JSON."""
        data = json.dumps(payload).encode() if isinstance(payload, int) else payload
        position, self._count = self._count, self._count + 1
        self.waiting[position] = Entry(position, topic, data, qos)
        return position

    def connected(self) -> None:
        self._past = self._count - 1

    def live(self, most: int, after: int = -1) -> list[Entry]:
        return self._some(most, max(after, self._past), self._count)

    def replay(self, most: int, after: int = -1) -> list[Entry]:
        return self._some(most, after, self._past + 1)

    def delivered(self, position: int) -> None:
        del self.waiting[position]
        self.delivered_at.append(position)

    def rejected(self, position: int, reason: str) -> None:
        del self.waiting[position]
        self.rejections[position] = reason

    def _some(self, most: int, after: int, end: int) -> list[Entry]:
        found = (entry for position, entry in self.waiting.items() if after < position < end)
        return list(itertools.islice(found, most))


def encode(entry: Entry, hist: bool, protocol: int) -> Outgoing:
    """As it is, with whether it is history."""
    return Outgoing(entry.topic, entry.payload, entry.qos, properties=Properties(user=(("hist", "1"),) if hist else ()))


class Ears:
    """Somebody who notes all that is told."""

    def __init__(self) -> None:
        self.connections: list[Connected] = []
        self.losses: list[Lost] = []
        self.commands: list[Incoming] = []
        self.alarms: list[tuple[str, str]] = []
        self.at_command: Callable[[Incoming], None] = lambda _: None

    def connected(self, what: Connected) -> None:
        self.connections.append(what)

    def lost(self, what: Lost) -> None:
        self.losses.append(what)

    def command(self, message: Incoming) -> None:
        self.commands.append(message)
        self.at_command(message)

    def alarm(self, name: str, text: str) -> None:
        self.alarms.append((name, text))

    def alarmed(self, name: str) -> bool:
        return any(each == name for each, _ in self.alarms)


class Linked(NamedTuple):
    """A link that was started, its messages, and who listens."""

    link: Link[Entry]
    source: Memory
    ears: Ears


def settings(*brokers: str, **more: object) -> Mqtt:
    """For tests: they wait for nothing longer than they must."""
    quick: dict[str, object] = {"device": "d1", "replay_per_s": 0.0, "first_wait_s": 0.05, "most_wait_s": 0.2}
    return Mqtt(brokers=brokers, **{**quick, **more})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def linked(
    options: Mqtt, source: Memory | None = None, *, greeting: bool = False, draw: Callable[[], float] = lambda: 0.5
) -> AsyncIterator[Linked]:
    """A link, stopped when the block is left. With `greeting` it says "online" first, and has a will, "gone"."""
    source, ears = source or Memory(), Ears()
    link = Link(
        options, source, encode, ears, draw=draw,
        will=Outgoing(STATE, b"gone", retain=True) if greeting else None,
        greeting=lambda _: [Outgoing(STATE, b"online", retain=True)] if greeting else [],
    )  # fmt: skip
    link.start()
    try:
        yield Linked(link, source, ears)
    finally:
        await link.stop(Outgoing(STATE, b"offline", retain=True) if greeting else None)


async def until(check: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until it holds. How long at most only bounds what a hang costs."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
