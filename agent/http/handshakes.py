"""Accepts connections that speak TLS: who connects shakes hands first, and is a connection of the server's only then.

Theory of operation. asyncio's servers keep one context for good, count nobody before the handshake is done, and drop
whoever speaks no TLS without a word. Here:

    accept --first byte--> it begins a handshake --> done in time, with the context of that moment --> the protocol
       |                   `--> anything else: one answer in plain HTTP/1.1, and the end
       `--no room: closed, which costs no handshake
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

import msgspec

from agent import log
from agent.access.access import Access
from agent.config import Config
from agent.http.sockets import Listener

# The first byte of a handshake: RFC 8446, section 5.1.
_HANDSHAKE = 22
# Between two looks at what else there is to do.
_AT_ONCE = 64
# Without memory or file descriptors nothing is accepted for so long, as asyncio has it.
_PAUSE_S = 1.0
# For whoever spoke no TLS to read why nothing came of it.
_LINGER_S = 2.0


class Handshakes:
    """Of one listener. `make` makes the protocol of a connection; `room` says how many more there may be."""

    def __init__(
        self,
        listener: Listener,
        access: Access,
        make: Callable[[], asyncio.Protocol],
        room: Callable[[], int],
        config: Config,
    ) -> None:
        self._listener, self._access, self._make, self._room = listener, access, make, room
        self._handshake_s, self._send_s = config.tls.handshake_s, config.http.send_s
        self._log = log.get("http")
        self._loop = asyncio.get_running_loop()
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        """Who has sent nothing yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._accept_more()

    def close(self) -> None:
        """Accept no more, and give up those that have not shaken hands yet."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for client in list(self._silent):
            self._give_up(client)
        for task in self._tasks:
            task.cancel()

    def _accept_more(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.error("no connection can be accepted now", error=error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._accept_more)
                return
            if len(self._silent) + len(self._tasks) >= self._room():
                client.close()
                continue
            client.setblocking(False)
            self._silent[client] = self._loop.call_later(self._handshake_s, self._give_up, client)
            self._loop.add_reader(client, self._begin, client)

    def _give_up(self, client: socket.socket) -> None:
        self._spoke(client)
        client.close()

    def _spoke(self, client: socket.socket) -> None:
        self._loop.remove_reader(client)
        self._silent.pop(client).cancel()

    def _begin(self, client: socket.socket) -> None:
        """Something came, or nothing ever will."""
        try:
            first = client.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._give_up(client)
            return
        self._spoke(client)
        task = self._loop.create_task(self._shake(client) if first[0] == _HANDSHAKE else self._explain(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake(self, client: socket.socket) -> None:
        loop: Any = self._loop  # typeshed has its last argument from Python 3.11 on alone, uvloop always
        try:
            await loop.connect_accepted_socket(
                self._make, client, ssl=self._access.context,
                ssl_handshake_timeout=self._handshake_s, ssl_shutdown_timeout=self._send_s,
            )  # fmt: skip
        except (ssl.SSLError, OSError, asyncio.TimeoutError, TimeoutError) as error:
            self._access.handshakes_failed += 1
            self._log.debug("no handshake", error=str(getattr(error, "reason", None) or error)[:200])

    async def _explain(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(_Plain, client)


class _Plain(asyncio.Protocol):
    """Answers whoever spoke no TLS, and waits for him to have read it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = msgspec.json.encode({"error": "TLS is spoken here; use https://"})
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        stream = cast(asyncio.WriteTransport, transport)  # uvloop's do not derive from it
        stream.write(head.encode() + body)
        stream.write_eof()
        # What still comes is read: closed over it, the connection would be reset under the answer.
        asyncio.get_running_loop().call_later(_LINGER_S, stream.close)
