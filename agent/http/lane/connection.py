"""One connection of the fast lane.

Theory of operation. One request of a connection is answered at a time, so that answers are in order:

    HEAD --plain head--> DOOR --slot--> BODY --all of it--> RUNNING --answer--> HEAD
      |                    `--refused--- | ---refused--------- | --refused--> REST --unread body dropped--> HEAD
      `--any other head--> aiohttp's protocol, for good, with every byte from that head on

From one state to the next it goes by plain calls; only for a slot at the door and for the engine it waits, and what it
waits for calls it. Bytes that come meanwhile are kept, and past a bound not read. Nothing of a request that the lane
hands over was done: neither is its call opened nor a byte of it consumed.

Who sends FIN has left, and what it asked for is cancelled, unless its request says `Connection: close`, or the
configuration says `half_close`: then it is done sending, has its answers, and the connection is closed behind them.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from agent import log
from agent.access.callers import Role
from agent.access.policy import Policy
from agent.calls import Call
from agent.errors import Reason, RefusedError
from agent.http.answers import judged, refusal
from agent.http.bodies import DROPPED_BYTES, add_piece, too_slow
from agent.http.lane.heads import Head, Sign
from agent.http.lane.ways import Asked, Way, answer
from agent.http.protocol import LINGER_S, READ_BYTES
from agent.http.sockets import is_secure, waited_s
from agent.http.tempo import Reader
from agent.limits.pace import Pace
from agent.repository import no_version
from agent.served import Entry

if TYPE_CHECKING:
    from agent.http.lane.lane import Lane


class State(enum.Enum):
    """What a connection waits for."""

    HEAD = "a request"
    DOOR = "a slot"
    BODY = "the rest of a body"
    RUNNING = "the engine"
    REST = "the rest of a body that nobody reads"
    CLOSED = "nothing more"


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1 with one client until it is closed, or `otherwise()` does."""

    __slots__ = (
        "_asked", "_call", "_cleared", "_client", "_data", "_ended", "_gateway", "_head", "_idle", "_lane", "_last",
        "_left", "_limit", "_loop", "_otherwise", "_pace", "_parts", "_reader", "_reads", "_since", "_state",
        "_transport",
        "_way", "_writes",
    )  # fmt: skip

    def __init__(self, lane: Lane, otherwise: Callable[[], asyncio.Protocol]) -> None:
        self._lane, self._gateway, self._otherwise = lane, lane.gateway, otherwise
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._client = ""
        self._cleared: tuple[Head, Policy] | None = None
        """The last head whose sender might ask what it asks, by which policy."""
        self._state = State.HEAD
        self._data = b""
        """What came and was not looked at, or not yet."""
        self._parts: list[bytes] = []
        self._left = 0
        """Bytes that BODY or REST waits for; in BODY, `_parts` are there."""
        self._head: Head | None = None
        self._call: Call | None = None
        self._way: Way | None = None
        self._asked: Asked | None = None
        self._last = False
        """Whether the connection is closed behind a body that nobody reads."""
        self._ended = False
        """Whether the client is done sending."""
        self._reads, self._writes = True, True
        self._since = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._pace: Pace | None = None
        self._reader: Reader | None = None

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self._client = _client_of(transport)
        if not self._lane.tempo.let_in(self, self._client, self._transport):
            self._state = State.CLOSED
            return
        self._lane.connections.add(self)
        self._since = time.monotonic()
        self._idle = self._loop.call_later(self._lane.http.keepalive_s, self._check_idle)

    def connection_lost(self, _: Exception | None) -> None:
        """Whatever it waits for is given up; what waits in a queue is never run."""
        self._leave()
        self._lane.tempo.places.remove(self)
        if self._reader is not None:
            self._reader.close()
        call, self._call = self._call, None
        if call is not None:
            self._gateway.settle(call, Reason.DISCONNECTED)

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is State.HEAD:
            self._data = self._data + data if self._data else data
            self._go_on()
            if len(self._data) > READ_BYTES and not self._writes:
                self._pause_reading()
        elif state is State.BODY:
            add_piece(self._parts, data)
            self._left -= len(data)
            if self._left <= 0:
                self._complete()
                self._go_on()
        elif state is State.REST:
            self._drop(data)
            self._go_on()
        elif state is not State.CLOSED:
            self._data += data
            if len(self._data) > READ_BYTES:
                self._pause_reading()

    def _pause_reading(self) -> None:
        """What came is enough, for now."""
        if self._reads:
            self._reads = False
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Whether the transport stays open. Over TLS it never does: whoever ends that has left."""
        self._ended = not is_secure(self._transport) and self._done_sending()
        return self._ended

    def _done_sending(self) -> bool:
        """Whether all that came is whole requests, and the last says that it is the last, or may be."""
        head, rest = self._head, self._data
        if head is None or self._state not in (State.DOOR, State.RUNNING):
            return False
        body = head.length if self._state is State.DOOR else 0
        while len(rest) > body:
            rest = rest[body:]
            behind = self._lane.heads.read(rest)
            if behind is Sign.ODD:
                # The other protocol is told when it has it.
                return True
            if not isinstance(behind, Head):
                # As there, a head that has begun is no request yet.
                return head.close or self._lane.http.half_close
            head, rest, body = behind, rest[len(behind.raw) :], behind.length
        return len(rest) == body and (head.close or self._lane.http.half_close)

    def pause_writing(self) -> None:
        self._writes = False
        self._reader = Reader(self._lane.tempo, self._transport)

    def resume_writing(self) -> None:
        self._writes = True
        if self._reader is not None and self._state is not State.CLOSED:
            self._reader.close()
        self._go_on()

    def close(self) -> None:
        """Close it when all that was written is sent; what runs for it is given up. It has its place until then."""
        call, self._call = self._call, None
        if call is not None:
            self._gateway.settle(call, Reason.DISCONNECTED)
        self._leave()
        self._transport.close()
        self._see_out()

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        return self._state is State.HEAD

    def give_up(self) -> None:
        """Close it for somebody else to come."""
        self.close()
        self._lane.tempo.places.remove(self)

    def _see_out(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._lane.tempo.see_out(self._transport)

    def _leave(self) -> None:
        """The lane has nothing to do with it any more."""
        self._state = State.CLOSED
        self._lane.connections.discard(self)
        self._stop_limit()
        if self._idle is not None:
            self._idle.cancel()
        self._data, self._parts = b"", []

    def _stop_limit(self) -> None:
        """What was to come is there, or nobody waits for it any more."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _hand_over(self) -> None:
        """Let the other protocol have it, with all that was not taken."""
        data, transport = self._data, self._transport
        self._leave()
        self._lane.tempo.places.remove(self)
        protocol = self._otherwise()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if not self._reads:
            transport.resume_reading()
        protocol.data_received(data)
        if self._ended and not protocol.eof_received():
            transport.close()

    def _check_idle(self) -> None:
        """Close it when the next head has taken too long."""
        left_s = self._lane.http.keepalive_s
        if self._state is State.HEAD:
            left_s += self._since - time.monotonic()
            if left_s <= 0:
                self.close()
                return
        self._idle = self._loop.call_later(left_s, self._check_idle)

    # --- the life of a request, in order

    def _go_on(self) -> None:
        """Begin with whatever request is there; a request that is answered at once makes room for the next."""
        while self._state is State.HEAD and self._writes:
            if self._data:
                head = self._read_head()
                if isinstance(head, Head):
                    ways = self._lane.way_for(head)
                    if ways is not None and (self._lane.access.policy.is_open or self._may(head)):
                        self._begin(head, *ways)
                        continue
                if head is not Sign.MORE:
                    self._hand_over()
                    return
                if self._limit is None:
                    self._limit = self._loop.call_later(self._lane.tempo.limits.head_s, self._head_is_late)
            if self._ended:
                self.close()
            elif not self._reads:
                self._reads = True
                self._transport.resume_reading()
            return

    def _head_is_late(self) -> None:
        self._leave()
        self._lane.tempo.late_head(self._transport)
        self._see_out()

    def _read_head(self) -> Head | Sign:
        last = self._head
        if last is not None and self._data.startswith(last.raw):
            return last
        return self._lane.heads.read(self._data)

    def _may(self, head: Head) -> bool:
        """Whether who sent it may; what he is told where he may not, the other protocol knows. The same head again
        needs no second look."""
        policy = self._lane.access.policy
        if self._cleared is not None and self._cleared[0] is head and self._cleared[1] is policy:
            return True
        try:
            caller = self._lane.access.caller(self._transport, head.authorization)
        except RefusedError:
            return False
        if not caller.may(Role.INFER, head.model):
            return False
        self._client = caller.name if caller.known else _client_of(self._transport)
        self._cleared = head, policy
        return True

    def _begin(self, head: Head, entry: Entry, way: Way) -> None:
        if self._limit is not None:
            self._stop_limit()
        call = self._gateway.open(self._client)
        call.echo, call.priority = head.echo, head.priority
        if head.timeout_s is not None:
            self._gateway.set_timeout(call, head.timeout_s, waited_s(self._transport))
        self._head, self._call, self._way = head, call, way
        self._data = self._data[len(head.raw) :]
        try:
            seated = self._gateway.ask(call, entry)
        except RefusedError as error:
            self._refuse(error)
            return
        if seated:
            self._seated(call, head)
        else:
            self._state = State.DOOR
            call.then(self._let_in)

    def _let_in(self, _: Any, error: RefusedError | None) -> None:
        """It has a slot, or will have none."""
        call, head = self._call, self._head
        if call is None or head is None:
            return
        if error is not None:
            self._refuse(error)
        else:
            self._seated(call, head)
        self._go_on()

    def _seated(self, call: Call, head: Head) -> None:
        served, _ = call.seat
        if head.version is not None and head.version != served.version:
            versions = self._lane.repository.versions(head.model)
            self._refuse(no_version(head.model, str(head.version), versions))
            return
        if self._way is None or self._way.served is not served:
            # Another version came while it waited at the door.
            self._way = self._lane.way(served)
            if self._way is None or not self._way.takes(head.length, head.header_length):
                self._call = None
                self._gateway.withdraw(call)
                self._data = head.raw + self._data
                self._hand_over()
                return
        data, length = self._data, head.length
        if len(data) >= length:
            self._data = data[length:]
            self._run(call, head, data[:length])
            return
        self._data, self._parts, self._left = b"", [data] if data else [], length - len(data)
        self._state = State.BODY
        now = time.monotonic()
        pace = self._pace = self._lane.tempo.pace(min(self._lane.http.body_s, max(call.deadline - now, 0.001)))
        self._limit = self._loop.call_later(pace.left_s(now), self._look_at_body)
        if not self._reads:
            self._reads = True
            self._transport.resume_reading()

    def _complete(self) -> None:
        """The body is there, and perhaps more."""
        call, head = self._call, self._head
        self._stop_limit()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if call is None or head is None:
            return
        self._data = data[head.length :]
        self._run(call, head, data if len(data) == head.length else data[: head.length])

    def _look_at_body(self) -> None:
        """Refuse one that comes too slowly."""
        head, pace, now = self._head, self._pace, time.monotonic()
        if head is None or pace is None:
            return
        missed = pace.too_slow(head.length - self._left, now)
        if not missed:
            self._limit = self._loop.call_later(pace.left_s(now), self._look_at_body)
            return
        self._refuse(too_slow(missed))
        self._go_on()

    def _run(self, call: Call, head: Head, body: bytes) -> None:
        self._state, self._left = State.RUNNING, 0
        _, slot = call.seat
        try:
            asked = self._asked = cast(Way, self._way).decode(body, head, slot)
            request = asked.request
            call.priority = request.priority or call.priority
            if request.timeout_s is not None:
                self._gateway.set_timeout(call, request.timeout_s, waited_s(self._transport))
            self._gateway.submit(call, request.shapes, asked.sizes, asked.wanted)
        except Exception as error:  # noqa: BLE001 - answered, and logged where it is ours; the server goes on
            self._refuse(error)
        else:
            call.then(self._answered)

    def _answered(self, result: Any, error: RefusedError | None) -> None:
        call, head, way, asked = self._call, self._head, self._way, self._asked
        if call is None or head is None or way is None or asked is None:
            return
        if error is not None:
            self._refuse(error)
        else:
            last = head.close or self._gateway.draining
            try:
                data = way.encode(call, asked, result, head.accept_encoding, last)
            except Exception as failed:  # noqa: BLE001 - as above
                self._refuse(failed)
            else:
                self._call = None
                self._gateway.settle(call, Reason.OK)
                self._transport.write(data)
                self._next(last)
        self._go_on()

    def _refuse(self, error: Exception) -> None:
        """Answer with a reason, and drop what is left of the body."""
        call, head = self._call, self._head
        if call is None or head is None:
            return
        self._stop_limit()
        if self._state is not State.BODY and self._state is not State.RUNNING:
            self._left = max(head.length - len(self._data), 0)
            self._data = self._data[head.length :]
        self._parts = []
        reason, message = judged(error)
        if reason is Reason.FAULT:
            log.get("http").exception("infer failed", **call.ids, exc_info=error)
        self._call = None
        self._gateway.settle(call, reason, message)
        response = refusal(reason, message, self._left > 0 and head.length > DROPPED_BYTES, error)
        last = head.close or response.keep_alive is False
        body = cast(bytes, response.body)
        headers = {name: value for name, value in response.headers.items() if name != "Content-Length"}
        self._transport.write(answer(response.status, headers, body, head.echo, last))
        if self._left:
            # Closed at once, a client that still sends would lose the answer.
            self._last, self._state = last, State.REST
            self._limit = self._loop.call_later(LINGER_S, self.close)
            if not self._reads:
                self._reads = True
                self._transport.resume_reading()
        else:
            self._next(last)

    def _drop(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left <= 0:
            self._data = data[len(data) + self._left :] if self._left else b""
            self._left = 0
            self._stop_limit()
            self._next(self._last)

    def _next(self, last: bool) -> None:
        """The request is answered."""
        self._way = self._asked = None
        self._since = time.monotonic()
        if last:
            self.close()
        else:
            self._state = State.HEAD


def _client_of(transport: asyncio.BaseTransport) -> str:
    """As aiohttp's `request.remote` has it."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, (tuple, list)) else str(peer or "")
