"""paho-mqtt in a thread of its own: what it is told goes in by `tell`, what happens comes out by a function.

    loop                      thread
    Connect  ------------->   a new client of the library, its socket (`wire`)
    Send(ticket, message) ->  publish
             <-------------   Opened | Settled(ticket, code) | Arrived | Subscribed
    Taken(mid) ----------->   the acknowledgement of a command
    Leave, Drop ---------->   DISCONNECT, or only the end of the connection
             <-------------   Ended: once for each Connect, whatever happened

Every connection has a client of its own, so that nothing that the library keeps for sending outlives it: what was not
acknowledged is sent again by who has it on disk. All of the library is called by this thread alone, and nothing here
waits for an answer; what goes wrong in it, or in a callback, ends the connection and not the thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.subscribeoptions import SubscribeOptions

from agent.errors import ConfigError
from agent.mqtt.backoff import Trouble, trouble_of
from agent.mqtt.brokers import Broker
from agent.mqtt.gate import NO_MAXIMUM, Limits
from agent.mqtt.identity import Identity
from agent.mqtt.packet import Incoming, Outgoing, Properties
from agent.mqtt.wire import DialError, Wire, dial

# Commands that came and were not taken: as many as we tell the broker that it may have open.
COMMANDS = 16
# The library looks at its keep-alive when it is called.
_LOOK_S = 1.0
_LEAVE_S = 2.0
# Identifiers that are in use still are passed over; there are more than a window has messages.
_TRIES = 8192
_TOPIC_INVALID, _UNSPECIFIED = 0x90, 0x80
_DONT_SEND_RETAINED = 2


class Connect(NamedTuple):
    """What a connection is made of. `identify` is called by the thread: it reads files."""

    number: int
    broker: Broker
    protocol: int
    client_id: str
    identify: Callable[[], Identity]
    keepalive_s: int
    connect_s: float
    session_expiry_s: int
    will: Outgoing | None
    will_delay_s: int
    filters: Sequence[str]
    packet_bytes: int


class Send(NamedTuple):
    """One message of a connection."""

    number: int
    ticket: int
    message: Outgoing


class Taken(NamedTuple):
    """A command was taken, and may be acknowledged."""

    number: int
    mid: int
    qos: int


class Leave(NamedTuple):
    """Say goodbye, so that no will is sent, and end the connection; where `quietly` is not, without goodbye."""

    number: int
    goodbye: bool = True


class Opened(NamedTuple):
    """The broker let us in."""

    number: int
    limits: Limits
    session_present: bool


class Settled(NamedTuple):
    """The broker answered with that code; a message of QoS 0 was written."""

    number: int
    ticket: int
    code: int


class Arrived(NamedTuple):
    """A command."""

    number: int
    mid: int
    message: Incoming


class Subscribed(NamedTuple):
    """What the broker says of each filter."""

    number: int
    codes: tuple[int, ...]


class Ended(NamedTuple):
    """There is no connection (any more). `step`: how far it came; `code`: the broker's reason, or -1."""

    number: int
    trouble: Trouble
    step: str
    code: int
    text: str
    reference: str = ""


Told = Connect | Send | Taken | Leave
Event = Opened | Settled | Arrived | Subscribed | Ended


class Client:
    """The thread. `report` is called by the loop, with all that happened since the last time, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[Sequence[Event]], None]) -> None:
        self._loop, self._report = loop, report
        self._told: collections.deque[Told] = collections.deque()
        self._events: collections.deque[Event] = collections.deque()
        self._reporting = False
        self._rung = False
        self._ends = False
        self._listens, self._bell = socket.socketpair()
        self._listens.setblocking(False)
        self._bell.setblocking(False)
        self.beat = time.monotonic()
        """When the thread last was on its way, which it is at least every second but while it connects."""
        self.dropped = 0
        """Commands that nobody took in time."""
        self.faults = 0
        """Callbacks that failed."""
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def tell(self, *what: Told) -> None:
        """By the loop: bounded by who tells, which sends no more than the gate lets in."""
        self._told.extend(what)
        self._ring()

    def end(self) -> None:
        """The thread ends, and its connection."""
        self._ends = True
        self._ring()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _ring(self) -> None:
        if self._rung:
            return
        self._rung = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            while not self._ends:
                told = self._next()
                if isinstance(told, Connect):
                    self._serve(told)
        finally:
            self._listens.close()
            self._bell.close()

    def _next(self) -> Told | None:
        """What is told next; what is told of a connection that is over is passed over by `_run`."""
        self.beat = time.monotonic()
        if self._told:
            return self._told.popleft()
        self.quiet(_LOOK_S)
        return None

    def quiet(self, timeout_s: float, wire: Wire | None = None, wants_write: bool = False) -> bool:
        """Wait until something is told, or the wire is ready: whether it can be read."""
        poll = select.poll()
        poll.register(self._listens, select.POLLIN)
        if wire is not None:
            poll.register(wire.fileno(), select.POLLIN | (select.POLLOUT if wants_write else 0))
        ready = dict(poll.poll(timeout_s * 1000))
        if self._listens.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._listens.recv(4096)
            # After the bell is empty and before what was told is read: so nothing is missed.
            self._rung = False
        return wire is not None and bool(ready.get(wire.fileno(), 0) & ~select.POLLOUT)

    def _serve(self, connect: Connect) -> None:
        try:
            self.post(self._served(connect))
        except Exception as error:  # noqa: BLE001  whatever the library does, the thread goes on
            text = f"{type(error).__name__}: {error}"[:300]
            self.post(Ended(connect.number, Trouble.PROTOCOL, "session", -1, text))

    def _served(self, connect: Connect) -> Ended:
        """A connection from its beginning to its end."""
        try:
            identity = connect.identify()
            sock = dial(connect.broker, identity.context, connect.connect_s)
        except DialError as error:
            return Ended(connect.number, error.trouble, error.step, -1, str(error))
        except ConfigError as error:
            return Ended(connect.number, Trouble.CERTIFICATE, "files", -1, str(error))
        connection = _Connection(self, connect, identity, Wire(sock, connect.packet_bytes))
        try:
            return connection.run()
        finally:
            connection.close()

    @property
    def ends(self) -> bool:
        return self._ends

    def take(self) -> Told | None:
        """The next that was told."""
        return self._told.popleft() if self._told else None

    def untake(self, told: Told) -> None:
        """It is of the next connection."""
        self._told.appendleft(told)

    def post(self, event: Event) -> None:
        """To the loop. Bounded: what was settled was let in before, and commands are counted."""
        self._events.append(event)
        if not self._reporting:
            self._reporting = True
            # Nobody listens where the loop is closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._reporting = False
        events = []
        while self._events:
            events.append(self._events.popleft())
        if events:
            self._report(events)


class _Paho(paho.Client):
    """The library's client, over a wire of ours. The method is private there, and the only way to its socket."""

    def __init__(self, wire: Wire, **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, **options)
        self._wire = wire

    def _create_socket(self) -> Wire:
        return self._wire


class _Connection:
    """One, from its beginning to its end, within the thread."""

    def __init__(self, client: Client, connect: Connect, identity: Identity, wire: Wire) -> None:
        self._client, self._connect, self._wire = client, connect, wire
        self._tickets: dict[int, tuple[int, int]] = {}
        self._written: list[int] = []
        self._commands = 0
        self._step = "login"
        self._opened = self._leaving = False
        self._ended: Ended | None = None
        self._paho = self._library(identity)

    def failed(self, trouble: Trouble, text: str, code: int = -1, reference: str = "") -> None:
        """What is said first is the cause; what comes behind it follows from it."""
        if self._ended is None:
            self._ended = Ended(self._connect.number, trouble, self._step, code, text, reference)

    def close(self) -> None:
        # The library counts what it keeps as waiting for an answer, and tells who waits for it.
        self._paho.drop_out_messages()
        self._wire.close()

    def run(self) -> Ended:
        """Until it is over, and why it is."""
        self._paho.reconnect()
        until = time.monotonic() + self._connect.connect_s
        while self._ended is None:
            self._client.beat = now = time.monotonic()
            if self._opened and not self._leaving:
                until = float("inf")
            if now >= until:
                text = "it did not end in time" if self._leaving else "no answer to CONNECT in time"
                self.failed(Trouble.NETWORK, text)
            elif self._client.ends or not self._obey():
                self.failed(Trouble.NETWORK, "ended")
            else:
                if self._leaving and until == float("inf"):
                    until = now + _LEAVE_S
                self._move(until - now)
        return self._ended

    def _library(self, identity: Identity) -> _Paho:
        connect = self._connect
        is_5 = connect.protocol == 5
        client = _Paho(
            self._wire,
            client_id=connect.client_id,
            protocol=paho.MQTTv5 if is_5 else paho.MQTTv311,
            reconnect_on_failure=False,
            manual_ack=True,
            clean_session=None if is_5 else not connect.session_expiry_s,
        )
        # The gate bounds it; the library would look through all of them for each answer.
        client.max_inflight_messages_set(0)
        # Whoever is told when there is something to write writes it himself.
        client.on_socket_register_write = lambda *_: None
        client.on_connect = self._guarded(self._on_connect)
        client.on_disconnect = self._guarded(self._on_disconnect)
        client.on_publish = self._guarded(self._on_publish)
        client.on_message = self._guarded(self._on_message)
        client.on_subscribe = self._guarded(self._on_subscribe)
        if identity.username:
            client.username_pw_set(identity.username, identity.password or None)
        if connect.will is not None:
            _set_will(client, connect.will, connect.will_delay_s, is_5)
        address = connect.broker.host, connect.broker.port, connect.keepalive_s
        if not is_5:
            client.connect_async(*address)
            return client
        properties = _properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = connect.session_expiry_s
        properties.ReceiveMaximum = COMMANDS
        properties.MaximumPacketSize = connect.packet_bytes
        client.connect_async(*address, clean_start=not connect.session_expiry_s, properties=properties)
        return client

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """What a callback raises would end the library's work with the connection half done."""

        def guarded(_: paho.Client, __: object, *arguments: Any) -> None:
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001
                self._client.faults += 1
                self.failed(Trouble.PROTOCOL, f"{call.__name__}: {type(error).__name__}: {error}"[:300])

        return guarded

    def _obey(self) -> bool:
        """Do all that was told. False: end without goodbye."""
        while (told := self._client.take()) is not None:
            if isinstance(told, Connect):
                # It is of the next connection: this one is over for who told it.
                self._client.untake(told)
                return False
            if told.number != self._connect.number:
                continue
            if isinstance(told, Send):
                self._publish(told)
            elif isinstance(told, Taken):
                self._acknowledge(told)
            elif told.goodbye and self._opened:
                self._paho.disconnect()
                self._leaving = True
            else:
                return False
        return True

    def _publish(self, told: Send) -> None:
        message = told.message
        properties = _packed(message.properties) if self._connect.protocol == 5 else None
        try:
            for _ in range(_TRIES):
                info = self._paho.publish(message.topic, message.payload, message.qos, message.retain, properties)
                if info.rc != paho.MQTT_ERR_QUEUE_SIZE:
                    self._tickets[info.mid] = told.ticket, message.qos
                    return
        except (ValueError, UnicodeEncodeError):
            self._client.post(Settled(told.number, told.ticket, _TOPIC_INVALID))
            return
        self._client.post(Settled(told.number, told.ticket, _UNSPECIFIED))

    def _acknowledge(self, told: Taken) -> None:
        self._commands -= 1
        if told.qos:
            self._paho.ack(told.mid, told.qos)

    def _move(self, within_s: float) -> None:
        """Write and read what can be, once."""
        wire, library = self._wire, self._paho
        try:
            if library.want_write():
                library.loop_write()
            wire.flush()
            self._settle_written()
            if self._ended is not None:
                return
            wants = bool(wire.unsent) or library.want_write()
            readable = self._client.quiet(0 if wire.unread else max(0.0, min(_LOOK_S, within_s)), wire, wants)
            if readable or wire.unread:
                library.loop_read()
            library.loop_misc()
        except ConnectionError as error:
            self.failed(*(wire.problem or (Trouble.NETWORK, str(error))))
        if library.socket() is None:
            self.failed(*(wire.problem or (Trouble.NETWORK, "the connection ended")))

    def _settle_written(self) -> None:
        """Those of QoS 0, when the kernel has them."""
        if self._written and not self._wire.unsent:
            for ticket in self._written:
                self._client.post(Settled(self._connect.number, ticket, 0))
            self._written.clear()

    def _on_connect(self, flags: paho.ConnectFlags, reason: Any, properties: Any) -> None:
        code = int(reason.value)
        if code:
            self.failed(trouble_of(code), _words(reason, properties), code, _text(properties, "ServerReference"))
            return
        self._opened, self._step = True, "session"
        limits = _limits(properties, self._connect.protocol, self._paho.keepalive)
        self._client.post(Opened(self._connect.number, limits, bool(flags.session_present)))
        if not self._connect.filters:
            return
        if self._connect.protocol == 5:
            # A command that is retained is one of long ago.
            options = SubscribeOptions(qos=1, retainHandling=_DONT_SEND_RETAINED)
            self._paho.subscribe([(each, options) for each in self._connect.filters])
        else:
            self._paho.subscribe([(each, 1) for each in self._connect.filters])

    def _on_disconnect(self, flags: paho.DisconnectFlags, reason: Any, properties: Any) -> None:
        if self._leaving:
            self.failed(Trouble.NETWORK, "ended")
        elif flags.is_disconnect_packet_from_server:
            code = int(reason.value)
            text = _words(reason, properties)
            self.failed(trouble_of(code), text, code, _text(properties, "ServerReference"))
        elif self._wire.problem is not None:
            self.failed(*self._wire.problem)
        # It ends connections itself for two reasons.
        elif str(reason) == "Keep alive timeout":
            self.failed(Trouble.NETWORK, "no answer to a ping")
        else:
            self.failed(Trouble.PROTOCOL, "the broker sent something that is no MQTT")

    def _on_publish(self, mid: int, reason: Any, _properties: Any) -> None:
        found = self._tickets.pop(mid, None)
        if found is None:
            return
        ticket, qos = found
        if qos:
            self._client.post(Settled(self._connect.number, ticket, int(reason.value)))
        else:
            self._written.append(ticket)

    def _on_message(self, message: paho.MQTTMessage) -> None:
        if self._commands >= COMMANDS:
            # Not acknowledged: the broker may send it again, on another connection.
            self._client.dropped += 1
            return
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = ""
        self._commands += 1
        incoming = Incoming(
            topic, bytes(message.payload), message.qos, bool(message.retain), _unpacked(message.properties),
            time.monotonic(),
        )  # fmt: skip
        self._client.post(Arrived(self._connect.number, message.mid, incoming))

    def _on_subscribe(self, _mid: int, codes: Sequence[Any], _properties: Any) -> None:
        self._client.post(Subscribed(self._connect.number, tuple(int(each.value) for each in codes)))


def _set_will(client: paho.Client, will: Outgoing, delay_s: int, is_5: bool) -> None:
    properties = None
    if is_5:
        properties = _packed(will.properties, PacketTypes.WILLMESSAGE)
        properties.WillDelayInterval = delay_s
    client.will_set(will.topic, will.payload, will.qos, will.retain, properties)


def _packed(given: Properties, kind: int = PacketTypes.PUBLISH) -> PahoProperties:
    packed = _properties(kind)
    if given.content_type:
        packed.ContentType = given.content_type
    if given.text:
        packed.PayloadFormatIndicator = 1
    if given.expiry_s is not None:
        packed.MessageExpiryInterval = given.expiry_s
    if given.response_topic:
        packed.ResponseTopic = given.response_topic
    if given.correlation:
        packed.CorrelationData = given.correlation
    if given.user:
        packed.UserProperty = list(given.user)
    return packed


def _properties(kind: int) -> PahoProperties:
    return PahoProperties(kind)  # type: ignore[no-untyped-call]


def _unpacked(found: Any) -> Properties:
    if found is None:
        return Properties()
    return Properties(
        _text(found, "ContentType"),
        bool(getattr(found, "PayloadFormatIndicator", 0)),
        getattr(found, "MessageExpiryInterval", None),
        _text(found, "ResponseTopic"),
        bytes(getattr(found, "CorrelationData", b"")),
        tuple((str(name), str(value)) for name, value in getattr(found, "UserProperty", ())),
    )


def _limits(properties: Any, protocol: int, keepalive_s: int) -> Limits:
    return Limits(
        protocol,
        getattr(properties, "ReceiveMaximum", NO_MAXIMUM),
        getattr(properties, "MaximumPacketSize", 0),
        getattr(properties, "MaximumQoS", 2),
        bool(getattr(properties, "RetainAvailable", 1)),
        keepalive_s,
        getattr(properties, "TopicAliasMaximum", 0),
    )


def _text(properties: Any, name: str) -> str:
    return str(getattr(properties, name, ""))[:1000]


def _words(reason: Any, properties: Any) -> str:
    text = _text(properties, "ReasonString")
    return f"{reason}: {text}" if text else str(reason)
