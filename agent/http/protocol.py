"""The connection: aiohttp's protocol with limits from the configuration and errors in the Open Inference form."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from aiohttp import web

from agent import log
from agent.config import Http
from agent.errors import AgentError

# A client that is refused while it sends reads the answer only if the connection is not reset under it: what it goes
# on to send is read and dropped for so long.
_LINGER_S = 2.0
# What a connection holds of a body that nobody reads yet; twice as much and one read of the loop at most.
_READ_BYTES = 64 << 10
_MAX_ERROR_CHARACTERS = 500


class Protocol(web.RequestHandler):
    """Answers what never becomes a request (bad syntax, heads that are too large) as `{"error": ...}`.

    aiohttp writes plain text, and a traceback into the log for every bad byte that a client sends.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has already begun")
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


class _Full(asyncio.Protocol):
    """Answers a connection past the limit, and closes it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = msgspec.json.encode({"error": f"{self._limit} connections are open, which is the limit"})
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        stream = cast(asyncio.WriteTransport, transport)  # uvloop's do not derive from it
        stream.write(head.encode() + body)
        stream.close()


def runner_of(application: web.Application, shutdown_s: float) -> web.AppRunner:
    """What owns the connections. A handler is cancelled when its client goes, so that nobody's request is run."""
    return web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)


async def listen(runner: web.AppRunner, http: Http) -> asyncio.Server:
    """Accept connections. Raises AgentError when the address cannot be had."""
    loop = asyncio.get_running_loop()
    manager: Any = runner.server

    def connection() -> asyncio.Protocol:
        if len(manager.connections) >= http.connections:
            return _Full(http.connections)
        return Protocol(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None turns it off, as in AppRunner
            auto_decompress=False,
            keepalive_timeout=http.keepalive_s,
            lingering_time=_LINGER_S,
            max_line_size=http.header_bytes,
            max_field_size=http.header_bytes,
            max_headers=http.headers,
            read_bufsize=_READ_BYTES,
        )

    try:
        return await loop.create_server(connection, http.host, http.port, backlog=128)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AgentError(
            f"cannot listen on {http.host}:{http.port}: {reason}", "choose another --host or --port"
        ) from None


def address_of(server: asyncio.Server) -> str:
    """The URL of its first socket."""
    host, port = server.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
