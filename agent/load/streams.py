"""Requests as records of long-lived streams of the agent (docs/streams.md), one at a time on each."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from yarl import URL

from agent.http.codecs import HEADER_LENGTH
from agent.http.framing import frames, lines
from agent.http.framing.decoder import Decoder
from agent.http.framing.frames import FrameDecoder
from agent.http.framing.lines import LineDecoder
from agent.load.samples import MAX_BYTES, Message
from agent.load.tally import failure_of

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_OK = 200


class _Record(msgspec.Struct):
    type: str
    id: str | None = None
    status: int = 0


class Streams:
    """Streams of one model, opened as they are needed and used again. `ask` takes one that is idle."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        self._session, self._url = session, url
        self._idle: dict[str, list[_Stream]] = {frames.MEDIA_TYPE: [], lines.MEDIA_TYPE: []}

    async def ask(self, message: Message, trace: str) -> tuple[int, str]:
        """(bytes received, why it failed, "" for an answer of status 200). Its id is the trace. Raises ClientError or
        OSError where there is no answer; a stream of which one was awaited in vain is closed."""
        header = message.headers.get(HEADER_LENGTH)
        idle = self._idle[lines.MEDIA_TYPE if header is None else frames.MEDIA_TYPE]
        stream = idle.pop() if idle else _Stream(self._session, self._url, header is not None)
        try:
            received, failure = await stream.ask(_record(message.body, header, trace), trace)
        except BaseException:
            stream.close()
            raise
        if stream.ended:
            stream.close()
        else:
            idle.append(stream)
        return received, failure

    def close(self) -> None:
        """Leave them all."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


def _record(body: bytes, header: str | None, trace: str) -> bytes:
    """The body of an infer request as a record with an id."""
    # Of an object that is not empty, and begins as msgspec writes it.
    named = b'{"id":"%b",%b' % (trace.encode(), body[1:])
    if header is None:
        return named + b"\n"
    return struct.pack("<II", 4 + len(named), int(header) + len(named) - len(body)) + named


class _Stream:
    """One exchange, opened by the first request."""

    def __init__(self, session: aiohttp.ClientSession, url: URL, binary: bool) -> None:
        self._session, self._url = session, url
        self._media_type = frames.MEDIA_TYPE if binary else lines.MEDIA_TYPE
        self._decoder: Decoder = (FrameDecoder if binary else LineDecoder)(MAX_BYTES)
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._response: aiohttp.ClientResponse | None = None
        self.ended = False
        """Whether the server takes no more."""

    async def ask(self, record: bytes, trace: str) -> tuple[int, str]:
        """As `Streams.ask`."""
        self._out.put_nowait(record)
        if self._response is None:
            self._response = await self._session.post(
                self._url, data=self._body(), headers={"Content-Type": self._media_type}, timeout=_NO_TIMEOUT,
                allow_redirects=False,
            )  # fmt: skip
            if self._response.status != _OK:
                self.ended = True
                body = await self._response.read()
                return len(body), failure_of(self._response.status, body)
        received = 0
        while True:
            while (message := self._decoder.next()) is not None:
                text = message.body[: int(message.header_length or len(message.body))]
                answer = msgspec.json.decode(text, type=_Record)
                if answer.type == "result" and answer.id == trace:
                    return received, ""
                # What has another id, or none, ends the stream.
                self.ended = answer.id != trace
                return received, failure_of(answer.status, text)
            data = await self._response.content.readany()
            if not data:
                raise aiohttp.ServerDisconnectedError
            received += len(data)
            self._decoder.feed(data)

    async def _body(self) -> AsyncIterator[bytes]:
        while (data := await self._out.get()) is not None:
            yield data

    def close(self) -> None:
        """End it, whatever is on its way."""
        self._out.put_nowait(None)
        with contextlib.suppress(RuntimeError):
            if self._response is not None:
                self._response.close()
