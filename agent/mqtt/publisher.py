"""Messages on their way out: into the log, and from the log through the link to a broker. On the event loop.

publisher = await Publisher.open(settings, clock, state)
publisher.publish(Message(...))     # in the log: durable within a tenth of a second, delivered when there is a broker

The state of the device is no message of the log: it is said first on every connection (birth), left with the broker as
the last will, and said once more at the end. All three are retained on one topic and name the same session, so that a
will that comes late is seen to be an older one's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agent import log
from agent.mqtt import topics
from agent.mqtt.boots import Boots
from agent.mqtt.envelope import encode
from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.link import Link, Listener
from agent.mqtt.message import Kind, Message, pack, unpack
from agent.mqtt.moment import Clock, Moment
from agent.mqtt.packet import Outgoing
from agent.mqtt.settings import Mqtt
from agent.mqtt.spool.gaps import Gap
from agent.mqtt.spool.keeper import Keeper
from agent.mqtt.spool.lane import Entry
from agent.mqtt.spool.policy import Limits
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.mqtt.spool.spool import Gaps, Spool

AGENT = "agent"
BIRTH_SCHEMA = "birth/1"
GAP, GAP_SCHEMA = "gap", "gap/1"
_LOG, _BOOTS = "log", "boots.json"

State = Callable[[], Mapping[str, object]]
"""What there is to say of the device beside its status."""
Meta = Callable[[], Sequence[Message]]
"""What the streams are: retained, and said on every connection behind the birth."""
Beside = Callable[[], Sequence[Outgoing]]
"""What is said in other conventions whenever the birth is."""


class Publisher:
    """See `open`."""

    def __init__(self, settings: Mqtt, clock: Clock, session: str, keeper: Keeper, boots: Boots, state: State) -> None:
        self._settings, self._clock, self._keeper, self._boots = settings, clock, keeper, boots
        self.session = session
        self._state = state
        self._log = log.get("mqtt")
        self._link: Link[Entry] | None = None
        self._beside: Beside = lambda: ()
        self._saving: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: Mqtt, clock: Clock, state: State, session: str = "") -> Publisher:
        """Open the log, which says what it has from before; `state` is read for every birth. Raises SpoolError."""
        session = session or secrets.token_hex(8)
        boots, spool = await asyncio.to_thread(_opened, settings, clock, session)
        return cls(settings, clock, session, Keeper(spool, boottime), boots, state)

    def start(
        self, listener: Listener, meta: Meta = lambda: (), beside: Beside = lambda: (), filters: Sequence[str] = ()
    ) -> None:
        """Begin to store and to send, and to hear what comes at `filters` beside commands. Raises ConfigError where
        the files that [mqtt] names cannot be used."""
        self._beside = beside
        self._link = Link(
            self._settings,
            self._keeper,
            self._encode,
            listener,
            will=self._offline("lost", clean=False),
            greeting=lambda protocol: [
                self._online(protocol),
                *(self._state_of(each, protocol) for each in meta()),
                *beside(),
            ],
            filters=(*self._settings.command_filters, *filters),
        )
        self._keeper.arrived = self._link.wake
        self._keeper.start()
        self._link.start()

    async def stop(self) -> None:
        """Say that this was on purpose, and make durable what could not be sent."""
        if self._link is not None:
            await self._link.stop(self._offline("stopped", clean=True))
        await self._keeper.stop()

    def publish(self, message: Message) -> bool:
        """Into the log; False where it was refused, which is counted and told. An alarm waits for no others."""
        stream = topics.stream(message.component, message.kind, message.name)
        urgent = message.kind is Kind.ALARM
        return self._keeper.put(message.kind.value, stream, pack(message), urgent=urgent) is not None

    def say_state(self) -> None:
        """The state of the device is another: say it again, if there is anybody to hear it."""
        if self._link is not None and self._link.state.is_connected:
            self._link.say([self._online(self._link.state.protocol), *self._beside()])

    def now(self) -> Moment:
        """What a message that is made now has."""
        now = self._clock.now()
        if self._boots.note(now) and (self._saving is None or self._saving.done()):
            self._saving = asyncio.get_running_loop().create_task(self._save())
        return now

    @property
    def link(self) -> LinkFigures:
        """How the connection does."""
        return LinkFigures() if self._link is None else self._link.state

    @property
    def spool(self) -> SpoolFigures:
        """What was produced, and what became of it."""
        return self._keeper.figures

    async def _save(self) -> None:
        try:
            await asyncio.to_thread(self._boots.save)
        except OSError as error:
            self._log.warning("when this boot was is not noted", error=str(error))

    def _online(self, protocol: int) -> Outgoing:
        return self._birth({"status": "online", **self._state()}, protocol)

    def _offline(self, reason: str, *, clean: bool) -> Outgoing:
        # Of a will nobody knows by which protocol it will be left; it says all that it has to in its body.
        protocol = (self._link.state.protocol if self._link else 0) or (4 if self._settings.protocol == "3.1.1" else 5)
        return self._birth({"status": "offline", "clean": clean, "reason": reason}, protocol)

    def _birth(self, body: Mapping[str, object], protocol: int) -> Outgoing:
        body = {**body, "session": self.session}
        return self._state_of(
            Message(AGENT, Kind.STATE, AGENT, body, self._clock.now(), BIRTH_SCHEMA, retain=True), protocol
        )

    def _state_of(self, message: Message, protocol: int) -> Outgoing:
        return self._outgoing(message, self.session, None, False, protocol)

    def _encode(self, entry: Entry, hist: bool, protocol: int) -> Outgoing:
        try:
            message = unpack(entry.body)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        return self._outgoing(message, entry.session, entry.seq, hist, protocol)

    def _outgoing(self, message: Message, session: str, seq: int | None, hist: bool, protocol: int) -> Outgoing:
        qos = self._settings.qos if message.kind is Kind.MEASURE else 1
        return encode(
            message, session=session, seq=seq, now=self._clock.now(), device=self._settings.device_name,
            prefix=self._settings.prefix, hist=hist, protocol=protocol, encoding=self._settings.encoding,
            known=self._boots.known, qos=qos,
        )  # fmt: skip


def boottime() -> float:
    """The spool's clock, in seconds: it goes on while the board sleeps, and nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _opened(settings: Mqtt, clock: Clock, session: str) -> tuple[Boots, Spool]:
    folder = settings.spool_folder
    spool = Spool.open(
        folder / _LOG,
        session,
        settings.policies,
        Gaps(Kind.EVENT.value, topics.stream(AGENT, Kind.EVENT, GAP), lambda gap, _: pack(_gap(gap, clock.now()))),
        boottime(),
        clock.now().boot_id,
        Limits(free_floor_bytes=int(settings.free_floor_mib * (1 << 20))),
    )
    return Boots(folder / _BOOTS), spool


def _gap(gap: Gap, now: Moment) -> Message:
    body: dict[str, object] = {
        "kind": gap.kind,
        "stream": gap.stream,
        "session": gap.session,
        "first": gap.first,
        "last": gap.last,
        "count": gap.count,
        "reason": gap.reason,
    }
    return Message(AGENT, Kind.EVENT, GAP, body, now, GAP_SCHEMA)
