"""The outgoing side of a stream: a response that goes on and on, and a reader that may be slow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any, cast

from aiohttp import web

from agent.errors import Reason, RefusedError
from agent.http.answers import SERVER
from agent.http.framing.encoder import Framing
from agent.http.sockets import untaken

# Written at once: as much as a socket takes in one go, and no more than is worth copying together.
PIECE_BYTES = 64 << 10


class SlowReaderError(RefusedError):
    """The client takes nothing of what it was sent."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(Reason.SLOW_READER, f"next to nothing was read for {patience_s:g} s")


class Sink:
    """Writes records, of which at most `unread_bytes` wait for the client in this process; who writes more waits.

    A client that takes next to nothing (by `bytes_per_s` of [limits]) for `patience_s` while somebody waits has
    SlowReaderError raised.
    """

    def __init__(self, request: web.Request, encoder: Framing, unread_bytes: int, patience_s: float) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        self.encoder = encoder
        self.wrote_at = time.monotonic()
        self._request, self._transport = request, request.transport
        self._limit, self._patience_s = unread_bytes, patience_s
        self._protocol = cast(Any, request.protocol)
        self._draining: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": encoder.media_type, "Cache-Control": "no-store", "X-Accel-Buffering": "no", **SERVER
            }
        )  # fmt: skip

    async def open(self) -> None:
        """Send the head, so that the client knows at once that it was let in."""
        # From here on its own patience counts.
        self._protocol.patient = True
        await self.response.prepare(self._request)
        self._allow(self._limit)
        if self.encoder.opening:
            await self.write(self.encoder.opening)

    async def write(self, data: bytes) -> None:
        """Send it, as soon as there is room."""
        self.wrote_at = time.monotonic()
        # Waiting is done here, where it has an end.
        await self._request.writer.write(data, drain=False)  # type: ignore[call-arg]  # aiohttp's StreamWriter has it
        await self._drain(self._limit)

    async def write_pieces(self, views: Iterable[memoryview]) -> None:
        """Send large tensors out of their slot. Pieces are copied: the last may leave after the slot is another's."""
        for view in views:
            for start in range(0, view.nbytes, PIECE_BYTES):
                await self.write(bytes(view[start : start + PIECE_BYTES]))

    async def heartbeat(self) -> None:
        """Show that this side is there."""
        await self.write(self.encoder.heartbeat)

    async def close(self, last: bytes = b"", patience_s: float | None = None) -> None:
        """Send what is left, and the end; cut off a client that takes nothing of it for so long."""
        self._patience_s = patience_s or self._patience_s
        try:
            data = last + self.encoder.closing
            if data:
                await self._request.writer.write(data, drain=False)  # type: ignore[call-arg]
            self._allow(0)
            await self._drain(0)
            await self.response.write_eof()
            if not self._transport.is_closing():
                # It may serve other requests.
                self._transport.set_write_buffer_limits()
                self._protocol.patient = False
        except SlowReaderError:
            self.abort()

    def abort(self) -> None:
        """Cut the client off."""
        self._transport.abort()

    def _allow(self, nbytes: int) -> None:
        self._check()
        self._transport.set_write_buffer_limits(high=nbytes, low=min(nbytes // 2, max(nbytes - PIECE_BYTES, 0)))

    async def _drain(self, limit: int) -> None:
        while self._unread() > limit:
            left = self._untaken()
            if self._draining is None:
                # Not cancelled when it takes long: aiohttp's future is one for all who wait, also for the next.
                self._draining = asyncio.create_task(self._drained())
            done, _ = await asyncio.wait([self._draining], timeout=self._patience_s)
            if done:
                self._draining = None
            elif left - self._untaken() < max(self._protocol.tempo.limits.bytes_per_s * self._patience_s, 1):
                raise SlowReaderError(self._patience_s)

    def _unread(self) -> int:
        self._check()
        return self._transport.get_write_buffer_size()

    def _untaken(self) -> int:
        self._check()
        return untaken(self._transport)

    def _check(self) -> None:
        # Of a transport that is closed nothing can be asked.
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    async def _drained(self) -> None:
        # Whoever writes to a connection that is lost hears of it then.
        with contextlib.suppress(ConnectionError):
            await self._request.writer.drain()
