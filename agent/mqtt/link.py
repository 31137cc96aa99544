"""One connection to a broker at a time, on the side of the loop: what goes next, and what to do when it ends.

    off --start--> connecting --Opened--> connected --Ended--> waiting --time--> connecting ...

All that it decides is decided by pure parts: the gate (how much, and what answers mean), the back-off (when), the
brokers (which). It takes messages from a `Source` and tells it what became of them; a message whose connection ended
before an answer is simply still there.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from agent import log
from agent.access.files import Watch
from agent.errors import ConfigError
from agent.mqtt import client as carrier
from agent.mqtt.backoff import BLAMED, Backoff, Trouble, Waits
from agent.mqtt.brokers import Broker, Brokers
from agent.mqtt.gate import Fate, Gate, Lane, Limits, Options
from agent.mqtt.identity import files_of, identify
from agent.mqtt.packet import Incoming, Outgoing, is_topic
from agent.mqtt.settings import Mqtt
from agent.mqtt.source import Placed, Source

# So often the thread is looked at; one that did nothing for so long, though it connects to nothing slower, is given up.
_HEALTH_S = 5.0
_STALLED_S = 300.0
# A stop waits so long for what is on its way, and for the thread.
_FAREWELL_S = 3.0
# Head, topic and properties of a command beside its payload.
_COMMAND_HEAD_BYTES = 64 << 10

E = TypeVar("E", bound=Placed)


class Connected(NamedTuple):
    """A connection began."""

    broker: Broker
    limits: Limits
    session_present: bool


class Lost(NamedTuple):
    """It ended, or none began; the next is tried in `retry_s`."""

    broker: Broker
    trouble: Trouble
    code: int
    text: str
    retry_s: float


class Listener(Protocol):
    """Who wants to know. What it raises is logged."""

    def connected(self, what: Connected) -> None: ...

    def lost(self, what: Lost) -> None: ...

    def command(self, message: Incoming) -> None: ...

    def alarm(self, name: str, text: str) -> None:
        """Something that waiting does not mend: `taken_over`, `flapping`, `authentication`, `certificate`,
        `stuck`, `not_subscribed`, `greeting_rejected`, `thread`."""


@dataclass
class Figures:
    """What happened since the start, and how it is now."""

    state: str = "off"
    broker: str = ""
    protocol: int = 0
    session_present: bool = False
    keepalive_s: int = 0
    connections: int = 0
    reconnects: int = 0
    failures: int = 0
    last_trouble: str = ""
    last_error: str = ""
    retry_s: float = 0.0
    inside: int = 0
    inside_bytes: int = 0
    delivered: int = 0
    put_off: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    resent: int = 0
    commands: int = 0
    commands_dropped: int = 0
    faults: int = 0
    taken_over: int = 0
    stuck: int = 0
    thread_restarts: int = 0

    @property
    def is_connected(self) -> bool:
        return self.state == "connected"


class Link(Generic[E]):
    """`encode` makes of an entry what is sent, given whether it is history, and the protocol (4 or 5). `greeting` is
    what begins every connection, before all else, given the protocol; `will` may be another for each."""

    def __init__(
        self,
        settings: Mqtt,
        source: Source[E],
        encode: Callable[[E, bool, int], Outgoing],
        listener: Listener,
        *,
        will: Outgoing | Callable[[], Outgoing] | None = None,
        greeting: Callable[[int], Sequence[Outgoing]] = lambda _: (),
        filters: Sequence[str] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings, self._source, self._encode, self._listener = settings, source, encode, listener
        self._will, self._greeting = will, greeting
        self._filters = (settings.command_filter,) if filters is None else tuple(filters)
        self._gate = Gate(_options(settings))
        self._backoff = Backoff(_waits(settings), draw)
        self._brokers = Brokers(settings.addresses)
        self._protocols: dict[Broker, int] = {}
        self._number = 0
        self._first: collections.deque[tuple[int, Outgoing]] = collections.deque()
        self._firsts: dict[int, Outgoing] = {}
        self._after = dict.fromkeys(Lane, -1)
        self._flying: set[tuple[Lane, int]] = set()
        self._figures = Figures()
        self._log = log.get("mqtt")
        self._client: carrier.Client | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._health: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._woken = self._stopping = self._renewing = False
        self._quiet: asyncio.Event = asyncio.Event()
        self._over: asyncio.Event = asyncio.Event()

    @property
    def state(self) -> Figures:
        """Figures, as they are now."""
        figures = self._figures
        figures.inside, figures.inside_bytes = self._gate.inside, self._gate.inside_bytes
        if self._client is not None:
            figures.commands_dropped, figures.faults = self._client.dropped, self._client.faults
        return figures

    def start(self) -> None:
        """Connect, and stay connected. Needs a running loop. Raises ConfigError for files that are not named right."""
        loop = asyncio.get_running_loop()
        if paths := files_of(self._settings):
            self._watch = Watch(paths, self._settings.watch_s, self.reload)
        self._begin_thread()
        self._health = loop.call_later(_HEALTH_S, self._look)
        self._connect()

    def wake(self) -> None:
        """The source may have something new. Costs next to nothing, any number of times."""
        if not self._woken and self._figures.is_connected:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    def say(self, messages: Sequence[Outgoing]) -> None:
        """Send these ahead of all that waits, where there is a connection: the next one begins with the greeting."""
        if self._figures.is_connected and not self._stopping:
            self._push_first(messages)
            self._pump()

    def reload(self) -> list[str]:
        """Files have changed: connect with them anew, where they can be used; else a line that says why not, and all
        stays as it was."""
        try:
            identify(self._settings, any(each.tls for each in self._settings.addresses))
        except ConfigError as error:
            self._log.error("the connection to the broker stays as it is", error=str(error))
            return [str(error)]
        if self._figures.is_connected:
            self._renewing = True
            self._tell_client(carrier.Leave(self._number))
        elif self._retry is not None:
            self._connect()
        return []

    async def stop(self, farewell: Outgoing | None = None) -> None:
        """Send `farewell` behind what is on its way, say goodbye, and end."""
        self._stopping = True
        for timer in (self._timer, self._retry, self._health):
            if timer is not None:
                timer.cancel()
        if self._watch is not None:
            self._watch.close()
        if self._client is None:
            return
        if self._figures.is_connected:
            if farewell is not None:
                self._push_first([farewell])
            self._quiet.clear()
            self._pump()
            await _within(self._quiet, _FAREWELL_S)
            self._tell_client(carrier.Leave(self._number))
            await _within(self._over, _FAREWELL_S)
        self._client.end()
        await asyncio.to_thread(self._client.join, _FAREWELL_S)
        self._figures.state = "off"

    def _begin_thread(self) -> None:
        self._client = carrier.Client(asyncio.get_running_loop(), self._happened)
        self._client.start()

    def _tell_client(self, *what: carrier.Told) -> None:
        if self._client is not None:
            self._client.tell(*what)

    def _connect(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        settings, broker = self._settings, self._brokers.current
        will = self._will() if callable(self._will) else self._will
        self._number += 1
        self._over.clear()
        self._figures.state, self._figures.broker = "connecting", str(broker)
        self._tell_client(
            carrier.Connect(
                self._number, broker, self._protocol_of(broker), settings.client_name,
                lambda: identify(settings, broker.tls), settings.keepalive_s, settings.connect_s,
                settings.session_expiry_s, will, settings.will_delay_s, self._filters,
                (settings.command_kib << 10) + _COMMAND_HEAD_BYTES,
            )
        )  # fmt: skip

    def _protocol_of(self, broker: Broker) -> int:
        if self._settings.protocol == "auto":
            return self._protocols.get(broker, 5)
        return 5 if self._settings.protocol == "5" else 4

    def _happened(self, events: Sequence[carrier.Event]) -> None:
        now = time.monotonic()
        for event in events:
            # Of a connection, or a thread, that was given up.
            if event.number != self._number:
                continue
            if isinstance(event, carrier.Settled):
                self._settled(event, now)
            elif isinstance(event, carrier.Arrived):
                self._arrived(event)
            elif isinstance(event, carrier.Opened):
                self._opened(event, now)
            elif isinstance(event, carrier.Subscribed):
                self._subscribed(event)
            else:
                self._ended(event, now)
        self._pump()

    def _opened(self, event: carrier.Opened, now: float) -> None:
        figures, broker = self._figures, self._brokers.current
        figures.state, figures.protocol, figures.keepalive_s = (
            "connected",
            event.limits.protocol,
            event.limits.keepalive_s,
        )
        figures.session_present = event.session_present
        figures.connections += 1
        figures.reconnects += figures.connections > 1
        self._protocols[broker] = event.limits.protocol
        self._brokers.connected()
        self._backoff.connected(now)
        self._gate.opened(event.limits, now)
        self._after = dict.fromkeys(Lane, -1)
        self._flying.clear()
        self._first.clear()
        self._firsts.clear()
        self._source.connected()
        self._push_first(self._greeting(event.limits.protocol))
        self._log.info("connected", broker=str(broker), protocol=event.limits.protocol)
        self._tell(self._listener.connected, Connected(broker, event.limits, event.session_present))

    def _subscribed(self, event: carrier.Subscribed) -> None:
        refused = [each for each, code in zip(self._filters, event.codes, strict=False) if code >= 0x80]
        if refused:
            self._alarm("not_subscribed", f"the broker does not let us subscribe to {', '.join(refused)}")

    def _arrived(self, event: carrier.Arrived) -> None:
        self._figures.commands += 1
        self._tell(self._listener.command, event.message)
        self._tell_client(carrier.Taken(event.number, event.mid, event.message.qos))

    def _settled(self, event: carrier.Settled, now: float) -> None:
        settled = self._gate.settle(event.ticket, event.code, now)
        if settled is None:
            return
        lane, position = settled.lane, settled.position
        self._flying.discard((lane, position))
        if settled.fate is Fate.LATER:
            self._figures.put_off += 1
            if lane is Lane.FIRST:
                self._first.appendleft((position, self._firsts[position]))
            else:
                self._after[lane] = min(self._after[lane], position - 1)
        elif settled.fate is Fate.DELIVERED:
            self._figures.delivered += 1
            if lane is not Lane.FIRST:
                self._source.delivered(position)
        else:
            self._rejected(lane, position, settled.reason)
        if lane is Lane.FIRST and settled.fate is not Fate.LATER:
            self._firsts.pop(position, None)

    def _rejected(self, lane: Lane, position: int, reason: str) -> None:
        counts = self._figures.rejected
        counts[reason] = counts.get(reason, 0) + 1
        if lane is not Lane.FIRST:
            self._source.rejected(position, reason)
            return
        message = self._firsts.pop(position, None)
        if message is not None:
            self._alarm("greeting_rejected", f"the broker did not take {message.topic}: {reason}")

    def _ended(self, event: carrier.Ended, now: float) -> None:
        was_connected, broker = self._figures.is_connected, self._brokers.current
        for each in self._gate.closed(was_connected and event.trouble in BLAMED):
            if each.fate is Fate.NEVER:
                self._rejected(each.lane, each.position, each.reason)
            else:
                self._figures.resent += 1
        self._flying.clear()
        self._over.set()
        self._quiet.set()
        if self._stopping:
            self._figures.state = "off"
            return
        if self._renewing and was_connected:
            self._renewing = False
            self._connect()
            return
        self._renewing = False
        wait_s = self._wait_s(event, was_connected, now)
        figures = self._figures
        figures.state, figures.retry_s = "waiting", wait_s
        figures.failures += 1
        figures.last_trouble, figures.last_error = event.trouble.value, f"{broker}: {event.text}"
        self._log.warning(
            "no connection to the broker", broker=str(broker), trouble=event.trouble.value, step=event.step,
            error=event.text, retry_s=round(wait_s, 1),
        )  # fmt: skip
        self._tell(self._listener.lost, Lost(broker, event.trouble, event.code, event.text, wait_s))
        self._say_trouble(event, broker)
        self._retry = asyncio.get_running_loop().call_later(wait_s, self._connect)

    def _wait_s(self, event: carrier.Ended, was_connected: bool, now: float) -> float:
        """Which broker is next, and after how long."""
        broker = self._brokers.current
        if event.reference and event.trouble is Trouble.MOVED and self._brokers.refer(event.reference):
            return 0.0
        if not was_connected and self._settings.protocol == "auto" and self._try_other_protocol(event, broker):
            return 0.0
        wait_s = self._backoff.failed(event.trouble, now)
        if was_connected:
            self._brokers.lost()
        elif not self._brokers.failed():
            # The next of them at once; a whole round waits. At random, for a fleet whose first broker went.
            return min(wait_s, self._settings.first_wait_s)
        return wait_s

    def _try_other_protocol(self, event: carrier.Ended, broker: Broker) -> bool:
        """A broker that has no MQTT 5 says so, or ends the connection without an answer: whether to ask it at once.
        Where it was the network, the other protocol fails as well, and the next time it is 5 again."""
        if event.step != "login":
            return False
        before = self._protocols.get(broker, 5)
        if event.code == 0x84:
            self._protocols[broker] = 4
            return before == 5
        if event.trouble is Trouble.CLOSED:
            self._protocols[broker] = 9 - before
        return False

    def _say_trouble(self, event: carrier.Ended, broker: Broker) -> None:
        if event.trouble is Trouble.TAKEN_OVER:
            self._figures.taken_over += 1
            self._alarm(
                "taken_over",
                f"another client at {broker} says that it is {self._settings.client_name!r}: give each device its own",
            )
        elif self._backoff.flaps:
            self._alarm(
                "flapping",
                f"{broker} ends each connection soon: is another client named {self._settings.client_name!r} as well?",
            )
        elif event.trouble in (Trouble.AUTHENTICATION, Trouble.CERTIFICATE):
            self._alarm(event.trouble.value, f"{broker}: {event.text}")

    def _push_first(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            position = max(self._firsts, default=-1) + 1
            self._firsts[position] = message
            self._first.append((position, message))

    def _pump(self) -> None:
        """Send what may go now."""
        self._woken = False
        if not self._figures.is_connected:
            return
        now = time.monotonic()
        if self._gate.stuck(now):
            self._give_up(now)
            return
        sends: list[carrier.Told] = []
        self._send_first(sends, now)
        if not self._stopping:
            for lane in (Lane.LIVE, Lane.REPLAY):
                self._send(lane, sends, now)
        elif not self._gate.inside and not self._first:
            self._quiet.set()
        if sends:
            self._tell_client(*sends)
        if self._timer is not None:
            self._timer.cancel()
        at = max(now + 0.001, self._gate.wakeup(now))
        self._timer = asyncio.get_running_loop().call_later(at - now, self._pump)

    def _send_first(self, sends: list[carrier.Told], now: float) -> None:
        while self._first and self._gate.room(Lane.FIRST, now):
            position, message = self._first.popleft()
            message = self._adapted(message)
            if (problem := self._problem(message)) is not None:
                self._rejected(Lane.FIRST, position, problem)
                continue
            ticket = self._gate.enter(Lane.FIRST, position, message, now)
            if ticket is None:
                self._first.appendleft((position, message))
                return
            sends.append(carrier.Send(self._number, ticket, message))

    def _send(self, lane: Lane, sends: list[carrier.Told], now: float) -> None:
        room = self._gate.room(lane, now)
        while room > 0:
            give = self._source.live if lane is Lane.LIVE else self._source.replay
            entries = give(room, self._after[lane])
            if not entries:
                return
            for entry in entries:
                if not self._send_entry(lane, entry, sends, now):
                    return
            room = self._gate.room(lane, now)

    def _send_entry(self, lane: Lane, entry: E, sends: list[carrier.Told], now: float) -> bool:
        """False: there is no room for it."""
        position = entry.position
        if (lane, position) not in self._flying:
            try:
                message = self._adapted(self._encode(entry, lane is Lane.REPLAY, self._gate.limits.protocol))
            except ValueError as error:
                self._log.error("a message cannot be sent", position=position, error=str(error))
                self._rejected(lane, position, "encoding")
            else:
                if (problem := self._problem(message)) is not None:
                    self._rejected(lane, position, problem)
                elif (ticket := self._gate.enter(lane, position, message, now)) is None:
                    return False
                else:
                    self._flying.add((lane, position))
                    sends.append(carrier.Send(self._number, ticket, message))
        self._after[lane] = position
        return True

    def _problem(self, message: Outgoing) -> str | None:
        """Why no broker, or not this one, takes it."""
        if not is_topic(message.topic):
            return "topic_invalid"
        return None if self._gate.fits(message) else "too_large"

    def _adapted(self, message: Outgoing) -> Outgoing:
        """As the broker can take it."""
        limits = self._gate.limits
        if message.qos <= limits.maximum_qos and (limits.retains or not message.retain):
            return message
        return replace(message, qos=min(message.qos, limits.maximum_qos), retain=message.retain and limits.retains)

    def _give_up(self, now: float) -> None:
        """The broker takes what it is given, and says nothing."""
        self._figures.stuck += 1
        text = f"{self._gate.inside} messages are not acknowledged for {self._settings.stuck_s:g} s"
        self._alarm("stuck", f"{self._brokers.current}: {text}")
        self._abandon(Trouble.STUCK, text, now)

    def _abandon(self, trouble: Trouble, text: str, now: float) -> None:
        number, self._number = self._number, self._number + 1
        self._tell_client(carrier.Leave(number, goodbye=False))
        self._ended(carrier.Ended(self._number, trouble, "session", -1, text), now)

    def _look(self) -> None:
        """Whether the thread is well: without it nothing would ever be sent again, and nobody would say so."""
        self._health = asyncio.get_running_loop().call_later(_HEALTH_S, self._look)
        client, now = self._client, time.monotonic()
        if client is None or (client.is_alive and now - client.beat < _STALLED_S):
            return
        text = "stands still" if client.is_alive else "ended"
        self._figures.thread_restarts += 1
        client.end()
        self._begin_thread()
        self._alarm("thread", f"the thread of the client {text}, and was started anew")
        if self._figures.state in ("connecting", "connected"):
            self._abandon(Trouble.PROTOCOL, f"the thread of the client {text}", now)

    def _alarm(self, name: str, text: str) -> None:
        self._log.error("alarm", name=name, text=text)
        self._tell(self._listener.alarm, name, text)

    def _tell(self, call: Callable[..., None], *what: object) -> None:
        try:
            call(*what)
        except Exception:  # noqa: BLE001  telemetry goes on, whatever becomes of one command
            self._figures.faults += 1
            self._log.exception("who listens to the link failed")


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return


def _options(settings: Mqtt) -> Options:
    return Options(
        settings.window,
        settings.window_kib << 10,
        settings.message_kib << 10,
        settings.replay_per_s,
        max(1, int(settings.replay_per_s / 10)),
        settings.stuck_s,
    )


def _waits(settings: Mqtt) -> Waits:
    return Waits(
        settings.first_wait_s,
        settings.most_wait_s,
        settings.slow_first_wait_s,
        settings.slow_most_wait_s,
        settings.stable_s,
    )
