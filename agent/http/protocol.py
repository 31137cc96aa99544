"""The connection: aiohttp's protocol with limits from the configuration and errors in the Open Inference form."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, StreamReader, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestPayloadError, _ErrInfo
from multidict import CIMultiDict, CIMultiDictProxy

from agent import log
from agent.access.access import Access
from agent.config import Config
from agent.errors import Reason, RefusedError
from agent.http.bodies import EXPECTATION
from agent.http.handshakes import Handshakes
from agent.http.sockets import Listener, is_secure
from agent.http.tempo import Reader, Tempo

if TYPE_CHECKING:
    from agent.http.lane.lane import Lane

# A client that is refused while it sends reads the answer only if the connection is not reset under it: what it goes
# on to send is read and dropped for so long.
LINGER_S = 2.0
# What a connection holds of a body that nobody reads yet; twice as much and one read of the loop at most.
READ_BYTES = 64 << 10
_MAX_ERROR_CHARACTERS = 500
# So many may shake hands while all places are taken.
_NEWCOMERS = 16


class Protocol(web.RequestHandler):
    """What aiohttp lacks.

    It answers what never becomes a request (bad syntax, heads that are too large) in plain text, and with a traceback
    in the log for every bad byte that a client sends: here it is `{"error": ...}`.

    It takes every FIN for a client that left. Here one behind a whole request is the end of what is sent, where that
    request says that it is the last (`Connection: close`, or HTTP/1.0), or where all are taken to with `half_close`:
    what was asked is answered, then the connection is closed.

    It forgets the requests that came together with what is none: here they are answered first. And of two requests that
    come together it may leave the second until more comes.

    Of a body whose chunks are broken it waits for the rest, with whatever the request holds. It answers what is not
    HTTP/1, and takes what follows a CONNECT that it refuses for no request.

    It answers `Expect: 100-continue` before anybody looked at the request: here `bodies.go_on` does, which is called
    when the body is taken.

    It waits for the end of a head, and for a client to take its answer, as long as that takes: here `tempo` says how
    slow they may be. Whoever writes to one that may be slower sets `patient`.
    """

    __slots__ = ("_half_close", "_head_limit", "_last", "_lost", "_reader", "patient", "tempo")

    def __init__(self, manager: Any, tempo: Tempo) -> None:
        http = tempo.http
        loop = asyncio.get_running_loop()
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None turns it off, as in AppRunner
            keepalive_timeout=http.keepalive_s,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
        )
        # Stops behind every request.
        self._parser = HttpRequestParser(
            self,
            loop,
            READ_BYTES,
            max_line_size=http.header_bytes,
            max_field_size=http.header_bytes,
            max_headers=http.headers,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )
        self.tempo, self._half_close = tempo, http.half_close
        self._head_limit: asyncio.TimerHandle | None = None
        self._reader: Reader | None = None
        self.patient = self._lost = False
        # The newest request, with its body.
        self._last: tuple[Any, StreamReader] | None = None
        self._request_factory = partial(_request, manager.request_factory)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # It had a place in the lane.
        peer = transport.get_extra_info("peername")
        self.tempo.places.add(self, str(peer[0]) if isinstance(peer, tuple | list) else str(peer or ""))
        super().connection_made(transport)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        return self._waiter is not None and not self._messages

    @property
    def was_too_slow(self) -> bool:
        """Whether it was cut off, for its client took next to nothing."""
        return self._reader is not None and self._reader.gave_up

    async def start(self) -> None:
        """Serve it to its end."""
        await super().start()
        self._see_out(self.transport)

    def force_close(self) -> None:
        """Close it when all that was written is sent."""
        transport = self.transport
        super().force_close()
        self._see_out(transport)

    def _see_out(self, transport: asyncio.Transport | None) -> None:
        if transport is not None and transport.is_closing() and not (self._lost or self.was_too_slow):
            if self._reader is not None:
                self._reader.close()
            self._reader = self.tempo.see_out(transport)

    def give_up(self) -> None:
        """Close it for somebody else to come."""
        self.force_close()
        self.tempo.places.remove(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lost = True
        self.tempo.places.remove(self)
        self._stop_head_limit()
        if self._reader is not None:
            self._reader.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        count = self._request_count
        # Blank lines are no head (RFC 9112, section 2.2).
        may_begin = (self._last is None or self._last[1].is_eof()) and not self._upgraded and data.strip(b"\r\n")
        self._take(data)
        if self._request_count != count:
            self._stop_head_limit()
        elif may_begin and self._head_limit is None:
            self._head_limit = self._loop.call_later(self.tempo.limits.head_s, self._look_at_head)

    def _look_at_head(self) -> None:
        """End the connection if the head that has begun is all that it is about."""
        self._head_limit = None
        if self.transport is None:
            return
        if self.is_idle:
            self.tempo.late_head(self.transport)
            self.force_close()
        else:
            self._head_limit = self._loop.call_later(self.tempo.limits.head_s, self._look_at_head)

    def _stop_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None and not self.patient:
            self._reader = Reader(self.tempo, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None and self.transport is not None and not self.transport.is_closing():
            self._reader.close()

    def _take(self, data: bytes) -> None:
        count = -1
        while True:
            super().data_received(data)
            if self._messages:
                self._end_a_broken_body()
            if self._messages:
                self._refuse_what_is_no_http_1()
                self._last = self._messages[-1]
            if self._holds_back() or (not data and count == self._request_count):
                return
            # The parser stopped behind a request. There may be another.
            count, data = self._request_count, b""

    def _end_a_broken_body(self) -> None:
        """Of a body whose chunks are none, aiohttp waits for the rest, and takes the error for that of a next request.
        Here the body fails with it, and nothing more is read."""
        error, _ = self._messages[-1]
        if self._last is None or self._last[1].is_eof() or isinstance(error, RawRequestMessage):
            return
        message, body = self._last
        self._messages.pop()
        why = error.message.strip().splitlines()[0]
        body.set_exception(RefusedError(Reason.BAD_REQUEST, f"the chunks of the body are not valid: {why}"))
        body.feed_eof()
        if self._messages:
            self._messages[-1] = (message._replace(should_close=True), body)
        else:
            self.close()

    def _refuse_what_is_no_http_1(self) -> None:
        """aiohttp answers HTTP/0.9 and HTTP/2.0 in their own name, and takes what follows a CONNECT for a tunnel
        though it refuses it: the next request would be read out of its body."""
        message, _ = self._messages[-1]
        if not isinstance(message, RawRequestMessage):
            return
        if message.version not in (HttpVersion10, HttpVersion11):
            text = f"HTTP/{message.version.major}.{message.version.minor} is not spoken here: HTTP/1.1 and HTTP/1.0 are"
        elif message.method == hdrs.METH_CONNECT:
            text = "CONNECT: this is no proxy"
        else:
            return
        self._messages[-1] = (_ErrInfo(400, BadHttpMessage(text), text), EMPTY_PAYLOAD)

    def _holds_back(self) -> bool:
        """Whether no more requests are wanted now, or can come."""
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            return True
        return self._reading_paused or self._upgraded or len(self._messages) >= self._max_msg_queue_size

    def eof_received(self) -> bool:  # type: ignore[override]  # what asyncio.Protocol has, aiohttp narrows
        """Whether the connection stays open, for what is to be answered yet. Over TLS it never does."""
        if is_secure(self.transport):
            return False
        idle = self._waiter is not None and not self._messages
        if idle or self._last is None or not self._last[1].is_eof():
            return False
        message, body = self._last
        if not isinstance(message, RawRequestMessage) or message.should_close:
            return True
        if self._half_close and self._messages:
            self._messages[-1] = (message._replace(should_close=True), body)
        elif self._half_close:
            self.close()
        return self._half_close

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has already begun")
        status = _status_of(exc) or status
        if status >= 500:
            log.get("http").error("request failed", exc_info=exc)
        text = (
            (message or str(exc) or "the server failed").strip().splitlines()[0]
            if status < 500
            else "the server failed"
        )
        response = web.Response(
            body=msgspec.json.encode({"error": text[:_MAX_ERROR_CHARACTERS]}),
            status=status,
            headers={"Content-Type": "application/json", "Server": "tightfit-agent"},
        )
        response.force_close()
        return response


def _status_of(error: BaseException | None) -> int | None:
    """That of a head which is too large (RFC 6585, section 5; RFC 9110, section 15.5.15); aiohttp has 400 for all."""
    if isinstance(error, LineTooLong):
        # It tells how the line begins, not which it is; no header of ours begins so.
        begins = error.args[0]
        return 414 if begins[:1] in (b"/", "/") else 431
    return 431 if isinstance(error, BadHttpMessage) and "Too many headers" in error.message else None


def _request(factory: Callable[..., web.BaseRequest], message: Any, *rest: Any) -> web.BaseRequest:
    """Make a request, with its expectation as an entry of its own: aiohttp would answer it at once."""
    expectation = message.headers.get("Expect")
    if expectation is None:
        return factory(message, *rest)
    headers = CIMultiDict(message.headers)
    del headers["Expect"]
    request = factory(message._replace(headers=CIMultiDictProxy(headers)), *rest)
    if message.version >= HttpVersion11:
        # Section 10.1.1 of RFC 9110: HTTP/1.0 has none.
        request[EXPECTATION] = expectation
    return request


def runner_of(application: web.Application, shutdown_s: float) -> web.AppRunner:
    """What owns the connections. A handler is cancelled when its client goes, so that nobody's request is run."""
    return web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)


async def listen(
    runner: web.AppRunner, lane: Lane, config: Config, access: Access, listener: Listener
) -> asyncio.Server | Handshakes:
    """Accept connections. Each begins in the lane."""
    loop = asyncio.get_running_loop()
    manager: Any = runner.server

    def room() -> int:
        # Who comes when all places are taken may yet have another's, which is known when he is.
        return max(config.http.connections - len(lane.tempo.places), _NEWCOMERS)

    def accepted() -> asyncio.Protocol:
        return lane.connection(partial(Protocol, manager, lane.tempo))

    if listener.secure:
        return Handshakes(listener, access, accepted, room, config)

    serve = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
    return await serve(accepted, sock=listener)
