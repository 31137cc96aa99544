"""The newest image that each model answered, for those who follow its results: one of each, of bounded size.

It is kept where the configuration says so (`picture_kib`), and nothing older than it is: whoever wants to see what a
result was about asks when the result comes, and reads in the answer which one the picture is of.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from agent.config import PICTURES
from agent.errors import Reason, RefusedError
from agent.http.answers import SERVER, json
from agent.served import Entry

RESULT = "Tightfit-Result"
"""Header of a picture: the id of the result that it belongs to, as an event of the results has it."""

_PIECE_BYTES = 64 << 10
# Whoever may look at a picture may not be made to run what is hidden in one.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}
_KINDS = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"))


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as it was sent, and the number of its result."""

    seq: int
    data: bytes
    kind: str


class Pictures:
    """The newest of every model that keeps one. `epoch` is that of the results."""

    def __init__(self, epoch: str, send_s: float) -> None:
        self._epoch, self._send_s = epoch, send_s
        self._newest: dict[str, Picture] = {}
        self._sending: dict[str, int] = {}

    def keep(self, entry: Entry, seq: int, data: bytes | memoryview) -> None:
        """What the result of that number was about; not kept where it is too large, or no JPEG or PNG."""
        limit = entry.options.picture_bytes
        kind = next((kind for begin, kind in _KINDS if data[: len(begin)] == begin), "")
        if kind and len(data) <= limit:
            self._newest[entry.name] = Picture(seq, bytes(data), kind)

    def forget(self, name: str) -> None:
        """Keep none of that model any more."""
        self._newest.pop(name, None)

    async def send(self, request: web.Request, entry: Entry) -> web.StreamResponse:
        """Answer with the newest. Raises RefusedError where none is shown, or when too many take one now."""
        if not entry.options.picture_bytes:
            raise RefusedError(
                Reason.CONTROL_DISABLED,
                f"pictures of model {entry.name!r} are not shown",
                "they are what clients sent: set picture_kib for it under [[models]] where that is wanted",
            )
        picture = self._newest.get(entry.name)
        if picture is None:
            return json({"error": f"model {entry.name!r} has answered no image that could be kept"}, 404)
        if self._sending.get(entry.name, 0) >= PICTURES - 1:
            raise RefusedError(Reason.QUEUE_FULL, "as many take a picture as may at once", "try again")
        self._sending[entry.name] = self._sending.get(entry.name, 0) + 1
        try:
            return await self._send(request, picture)
        finally:
            self._sending[entry.name] -= 1

    async def _send(self, request: web.Request, picture: Picture) -> web.StreamResponse:
        headers = {"Content-Type": picture.kind, RESULT: f"{self._epoch}-{picture.seq}", **_HEADERS, **SERVER}
        response = web.StreamResponse(headers=headers)
        response.content_length = len(picture.data)
        await response.prepare(request)
        try:
            await asyncio.wait_for(_write(response, picture.data), self._send_s)
        except (TimeoutError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    for start in range(0, len(data), _PIECE_BYTES):
        await response.write(data[start : start + _PIECE_BYTES])
    await response.write_eof()
