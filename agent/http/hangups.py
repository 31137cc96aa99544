"""Notices that a client is gone although nothing is read from its connection.

While a stream is as far behind as it may be, its socket is not read, and what is not read is not seen to end: what the
client asked for would be run for nobody. epoll(7) reports a hang-up (EPOLLRDHUP, EPOLLHUP, EPOLLERR) without reading,
and an epoll instance can itself be watched by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Iterator


class Hangups:
    """Watches connections of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._watched: dict[int, asyncio.Transport] = {}
        self._loop.add_reader(self._epoll.fileno(), self._on_events)

    def close(self) -> None:
        """Watch no more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    @contextlib.contextmanager
    def watching(self, transport: asyncio.Transport | None, half_close: bool = False) -> Iterator[None]:
        """Abort the connection when its client hangs up within the block. Raises ConnectionResetError if it has.

        A client that may `half_close` has not hung up when it only sends no more.
        """
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        fd = transport.get_extra_info("socket").fileno()
        self._watched[fd] = transport
        # EPOLLHUP, both directions, and EPOLLERR come unasked.
        self._epoll.register(fd, 0 if half_close else select.EPOLLRDHUP)
        try:
            yield
        finally:
            # A connection that was closed has left its number to the next, which may be watched by now.
            if self._watched.get(fd) is transport:
                self._forget(fd)

    def _forget(self, fd: int) -> asyncio.Transport | None:
        # The kernel has forgotten what was closed, and all of it where this was.
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)
        return self._watched.pop(fd, None)

    def _on_events(self) -> None:
        for fd, _ in self._epoll.poll(0):
            transport = self._forget(fd)
            if transport is not None:
                transport.abort()
