"""Request and response bodies: read within limits, decompressed within limits, compressed when it pays."""

from __future__ import annotations

import asyncio
import time
import zlib

from aiohttp import web

from agent.config import Limits
from agent.errors import Reason, RefusedError
from agent.limits.pace import Pace
from targets.tensor import human

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
# Below this the header costs more than is saved.
_WORTH_COMPRESSING_BYTES = 1024
# A board's cores have better things to do than the last per cent.
_LEVEL = 1
# The body of a request that is refused is read to its end and dropped, so that its connection stays; not one past this.
DROPPED_BYTES = 1 << 20
# A piece costs some fifty bytes besides what is in it: smaller ones are put together.
_PIECE_BYTES = 4096


EXPECTATION = "expectation"
"""Entry of a request for what its header Expect says, until that is met."""


async def go_on(request: web.Request) -> None:
    """Answer `Expect: 100-continue`: the body will be taken. Who is refused instead never sends it."""
    if request.pop(EXPECTATION, None) and not request.content.is_eof():
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # What counts as output is the final answer only.
        request.writer.output_size = 0


def check_length(request: web.Request, limit: int) -> None:
    """Refuse by Content-Length, before any of the body is read."""
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)


async def read_body(request: web.Request, limit: int, timeout_s: float, limits: Limits | None = None) -> bytes:
    """All of the body, at most `limit` bytes, at most `timeout_s` long and at the pace of `limits`."""
    check_length(request, limit)
    await go_on(request)
    body = _Body(request, limit)
    if request.content.is_eof():
        return await body.collect()
    bytes_per_s, pace_s = (limits.bytes_per_s, limits.pace_s) if limits else (0, timeout_s)
    pace = Pace(timeout_s, bytes_per_s, pace_s, time.monotonic())
    collecting = asyncio.ensure_future(body.collect())
    try:
        while not collecting.done():
            await asyncio.wait((collecting,), timeout=pace.left_s(time.monotonic()))
            if not collecting.done() and (missed := pace.too_slow(body.size, time.monotonic())):
                raise too_slow(missed)
        return collecting.result()
    finally:
        collecting.cancel()


def add_piece(parts: list[bytes], piece: bytes) -> None:
    """Keep a piece of a body. One that comes in pieces of two bytes holds no more memory than any other."""
    if len(piece) < _PIECE_BYTES and parts and len(parts[-1]) < _PIECE_BYTES:
        parts[-1] += piece
    else:
        parts.append(piece)


class _Body:
    """One that comes, piece by piece; `size` is what came."""

    def __init__(self, request: web.Request, limit: int) -> None:
        self._content, self._limit = request.content, limit
        self.size = 0

    async def collect(self) -> bytes:
        parts: list[bytes] = []
        async for part in self._content.iter_any():
            self.size += len(part)
            if self.size > self._limit:
                raise _too_large(self._limit)
            add_piece(parts, part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def too_slow(missed: str) -> RefusedError:
    """What is said where a body does not come."""
    return RefusedError(Reason.SLOW_BODY, f"the body did not arrive {missed}")


def _too_large(limit: int) -> RefusedError:
    return RefusedError(Reason.TOO_LARGE, f"the body has more than {human(limit)}", "this model needs no more")


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a Content-Encoding of gzip or deflate (with or without zlib's header) without ever exceeding `limit`."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RefusedError(
            Reason.UNSUPPORTED_ENCODING, f"Content-Encoding {encoding[:40]!r}", "available: gzip, deflate"
        )
    try:
        try:
            return _inflate(body, _GZIP_OR_ZLIB, limit)
        except zlib.error:
            if encoding != "deflate":
                raise
            return _inflate(body, -zlib.MAX_WBITS, limit)
    except zlib.error as error:
        raise RefusedError(Reason.BAD_REQUEST, f"the body is not valid {encoding}: {error}") from None


def _inflate(body: bytes, wbits: int, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits)
    data = stream.decompress(body, limit + 1)
    if len(data) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise zlib.error("it ends too early")
    if stream.unused_data:
        raise zlib.error("more follows its end")
    return data


def choose_encoding(accept: str | None, binary: bool, nbytes: int) -> str | None:
    """gzip, deflate or None for a response.

    Client libraries send a list of codings by themselves. Tensor bytes hardly shrink, so they are compressed only
    for a client that names a single coding, as tritonclient does when a person asked for it.
    """
    if not accept or nbytes < _WORTH_COMPRESSING_BYTES:
        return None
    accepted = [name for name, quality in map(_coding, accept.lower().split(",")) if quality > 0]
    if binary and len(accepted) != 1:
        return None
    return next((name for name in _WBITS if name in accepted), None)


def _coding(item: str) -> tuple[str, float]:
    name, _, parameter = item.partition(";")
    key, _, value = parameter.strip().partition("=")
    try:
        return name.strip(), float(value) if key == "q" else 1.0
    except ValueError:
        return name.strip(), 0.0


def compress(body: bytes, encoding: str) -> bytes:
    """The body in that coding."""
    stream = zlib.compressobj(_LEVEL, wbits=_WBITS[encoding])
    return stream.compress(body) + stream.flush()
