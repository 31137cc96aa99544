"""Clients of benchmarks: in closed loop, at a fixed rate, such as leave before they are answered, and the least one.

Poisson arrivals at a load come from `agent.load`. Everything here is for one model of one server, over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from agent.load.client import session_of
from agent.load.samples import Form, Message, infer_message
from agent.load.tally import failure_of
from bench.rivals.server import Server
from bench.served_models import ServedModel
from targets.tensor import DType

OK = 200
LOST = 0
# Longer than anything that is measured, so that no client waits for ever.
GIVE_UP_S = 20.0
UNANSWERED = f"no answer within {GIVE_UP_S:g} s"
# A client that is refused asks again after this: else it would be refusals that are measured.
_PAUSE_S = 0.01
_CONNECTIONS = 256
_SEND_S = 0.1
_TIMEOUT = aiohttp.ClientTimeout(total=GIVE_UP_S)


@dataclass(frozen=True)
class Target:
    """A model of a server; `name` is what the tables call it, `path` the model's own name in URLs."""

    name: str
    server: Server
    path: str
    model: ServedModel

    def message(self, rows: int = 1, binary: bool = True, **parameters: int) -> Message:
        """A request of these parameters: `priority`, 1 the highest, and `timeout`, microseconds. Numbers in JSON have
        eleven decimals, so that the tiny model's body has 1 KB."""
        form, x = Form(f"/v2/models/{self.path}/infer", binary, parameters), self.model.sample(rows)
        return infer_message(form, [("x", DType.FLOAT32, x if binary else x.astype(np.float64).round(11))])


@dataclass(frozen=True)
class Answer:
    """What became of one request: status (LOST without an answer), why not, and from when it was due to its end, in
    seconds of time.monotonic()."""

    status: int
    failure: str
    due: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.due


class Caller:
    """Kept-alive connections to one server, as many as needed; made by `calling`."""

    def __init__(self, session: aiohttp.ClientSession, server: Server) -> None:
        self._session = session
        self._address = server.address

    async def ask(self, message: Message, due: float | None = None) -> Answer:
        """One request to its end, whatever that is."""
        due = time.monotonic() if due is None else due
        status, failure = LOST, ""
        try:
            async with self._session.post(
                self._address + message.path, data=message.body, headers=message.headers, timeout=_TIMEOUT
            ) as response:
                body = await response.read()
                status = response.status
            if status != OK:
                failure = failure_of(status, body)
        except asyncio.TimeoutError:
            failure = UNANSWERED
        except (aiohttp.ClientError, OSError) as error:
            failure = f"connection lost ({type(error).__name__})"
        return Answer(status, failure, due, time.monotonic())

    async def loop(self, message: Message, ended: Callable[[], bool], pause_s: float = 0.0) -> list[Answer]:
        """Closed loop: the next request goes out `pause_s` after the answer to the last."""
        answers = []
        while not ended():
            answers.append(await self.ask(message))
            pause = pause_s if answers[-1].status == OK else max(pause_s, _PAUSE_S)
            if pause:
                await asyncio.sleep(pause)
        return answers

    async def at_rate(self, message: Message, rate: float, ended: Callable[[], bool]) -> list[Answer]:
        """Open loop: evenly spaced requests, each sent when it is due whatever became of the others."""
        start = time.monotonic()
        asked: list[asyncio.Future[Answer]] = []
        while not ended():
            due = start + len(asked) / rate
            await asyncio.sleep(due - time.monotonic())
            asked.append(asyncio.ensure_future(self.ask(message, due)))
        return list(await asyncio.gather(*asked))


@contextlib.asynccontextmanager
async def calling(server: Server) -> AsyncIterator[Caller]:
    """A caller, for as long as the context lasts."""
    async with session_of(_CONNECTIONS) as session:
        yield Caller(session, server)


def raw(message: Message) -> bytes:
    """The message as HTTP/1.1 has it."""
    lines = [f"POST {message.path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(message.body)}"]
    lines += [f"{name}: {text}" for name, text in message.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + message.body


async def send_and_leave(server: Server, message: Message, count: int) -> None:
    """Send the message on `count` connections of their own, and close all without reading a byte."""
    address = urlsplit(server.address)
    opened = [await asyncio.open_connection(address.hostname, address.port) for _ in range(count)]
    request = raw(message)
    try:
        for _, writer in opened:
            writer.write(request)
        with contextlib.suppress(asyncio.TimeoutError):
            # A server that leaves bodies unread while it is busy lets the last of them wait here.
            await asyncio.wait_for(asyncio.gather(*(writer.drain() for _, writer in opened)), _SEND_S)
    finally:
        for _, writer in opened:
            writer.transport.abort()


def connect(server: Server) -> socket.socket:
    """A connection that sends at once what it is given."""
    address = urlsplit(server.address)
    connection = socket.create_connection((address.hostname or "", address.port or 80))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Connection:
    """The least an HTTP/1.1 client can do, so that what is measured is the server."""

    def __init__(self, server: Server) -> None:
        self._socket = connect(server)
        self._buffer = bytearray(1 << 20)

    def close(self) -> None:
        self._socket.close()

    def exchange(self, request: bytes) -> bytes:
        """Send a request, return the body of its answer; anything but 200 is an error."""
        self._socket.sendall(request)
        view, size, need = memoryview(self._buffer), 0, None
        while need is None or size < need:
            size += self._socket.recv_into(view[size:])
            end = self._buffer.find(b"\r\n\r\n", 0, size)
            if need is None and end >= 0:
                head = bytes(view[:end])
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                if not head.startswith(b"HTTP/1.1 200") or length is None:
                    raise RuntimeError(head.decode())
                start, need = end + 4, end + 4 + int(length[1])
        return bytes(view[start:need])
