"""Sending: open loop on a schedule, closed loop for the capacity.

Theory of operation. As many workers as there may be connections share one iterator of arrivals. Each takes the next,
sleeps until it is due, sends it, reads the answer, and takes the next: the queue for a connection is first come first
served, and takes no memory, as it is the part of the schedule that nobody took yet. A worker that comes late to an
arrival's due time says so: every connection was busy. One that was asleep and wakes late shows what the generator
itself adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import selectors
import signal
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from agent.load.arrivals import Arrival, Pick
from agent.load.credentials import Credentials
from agent.load.histogram import Histogram
from agent.load.samples import Kind, Message, Metadata
from agent.load.streams import Streams
from agent.load.tally import Measured, Outcome, Tally, failure_of
from targets.errors import TightfitError

T = TypeVar("T")

# select() takes no more files than 1024.
MAX_CONNECTIONS = 512
# Of an answer that is not 200 so much is kept, for its message.
_ERROR_BYTES = 16 << 10
_METADATA_BYTES = 4 << 20
# Between two tries in closed loop: a server that refuses at once would else be asked as fast as it can refuse.
_PAUSE_S = 0.01
# The first request is due so long after the start, when every worker waits.
_LEAD_S = 0.02
_TICK_S = 0.01
# aiohttp rounds times past 5 s up to whole seconds where it is not told otherwise.
_NEVER_ROUND = 1e9
# Compressing would be measured with the rest.
_NO_HEADERS = ("Accept", "Accept-Encoding")


def run(work: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run to the end; the event is set by the first Ctrl-C, the second ends the program."""
    # epoll counts in milliseconds and would send most requests up to one late; select in microseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    stop = asyncio.Event()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    try:
        asyncio.set_event_loop(loop)
        loop.add_signal_handler(signal.SIGINT, interrupt)
        return loop.run_until_complete(work(stop))
    finally:
        # What aiohttp still writes for streams that were left.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


class Client:
    """One server, one pool of kept-alive connections, or of `streams`, and one mix of requests."""

    def __init__(
        self, session: aiohttp.ClientSession, base: URL, kinds: Sequence[Kind], connections: int, timeout_s: float,
        streams: Streams | None = None,
    ) -> None:  # fmt: skip
        self._session = session
        self._streams = streams
        self._kinds = kinds
        self._connections = connections
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self.trace = secrets.token_hex(8)
        with warnings.catch_warnings():
            # That a large body is written in one go is what we want: it is in memory, and reused.
            warnings.simplefilter("ignore", ResourceWarning)
            self._ready = [[_Ready.of(base, message) for message in kind.messages] for kind in kinds]

    async def capacity(self, picked: Iterator[Pick], seconds: float, stop: asyncio.Event) -> tuple[float, int]:
        """(answers of status 200 a second when each connection sends again as soon as it is answered, connections).

        A connection that is refused is given up, but for the last: what a server can do is not found by asking it for
        more than it admits, and refusing takes its time too.
        """
        end = self._loop.time() + seconds
        answered, used = 0, self._connections

        async def worker() -> None:
            nonlocal answered, used
            while (now := self._loop.time()) < end:
                outcome = await self._send(next(picked), now, now, True, end + self._timeout_s)
                answered += not outcome.failure and outcome.ended <= end
                if outcome.failure and used > 1:
                    used -= 1
                    return
                if outcome.failure:
                    await asyncio.sleep(_PAUSE_S)

        await self._together(worker, stop)
        return (answered / seconds if seconds else 0.0), used

    async def measure(
        self, schedule: Iterator[Arrival], warmup_s: float, deadline_s: float | None, stop: asyncio.Event
    ) -> Measured:
        """Send the arrivals, from -warmup_s on, when they are due; those before offset 0 are not counted. Ends when all
        are answered or given up, at most the timeout after the last was due."""
        measured = Measured([Tally() for _ in self._kinds])
        began, cpu = self._loop.time(), time.process_time()
        start = began + _LEAD_S + warmup_s
        in_flight = 0

        async def worker() -> None:
            nonlocal in_flight
            for arrival in schedule:
                due = start + arrival.offset_s
                delay = due - self._loop.time()
                if delay > 0:
                    await asyncio.sleep(delay)
                counted = arrival.offset_s >= 0
                in_flight += counted
                outcome = await self._send(arrival.pick, due, self._loop.time(), delay > 0, due + self._timeout_s)
                in_flight -= counted
                if counted:
                    measured.tallies[arrival.pick.kind].add(outcome, deadline_s)
                    measured.last_offset_s = max(measured.last_offset_s, arrival.offset_s)

        ticking = asyncio.ensure_future(self._tick(measured.lag))
        try:
            await self._together(worker, stop)
        finally:
            ticking.cancel()
        now = self._loop.time()
        measured.end_s = now - start
        measured.cpu_share = (time.process_time() - cpu) / (now - began)
        measured.stopped = stop.is_set()
        if measured.stopped:
            # What nobody took although it was due waited for a connection, and must not be forgotten.
            overdue = itertools.takewhile(lambda arrival: arrival.offset_s <= measured.end_s, schedule)
            measured.cut_off = in_flight + sum(arrival.offset_s >= 0 for arrival in overdue)
        return measured

    async def _tick(self, lag: Histogram) -> None:
        """Record how late this loop is for a tick, until cancelled."""
        due = self._loop.time()
        while True:
            due += _TICK_S
            await asyncio.sleep(due - self._loop.time())
            lag.record(max(round((self._loop.time() - due) * 1e9), 0))

    async def _together(self, worker: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
        """All workers to their end, or until the stop."""

        async def everyone() -> None:
            await asyncio.gather(*(worker() for _ in range(self._connections)))

        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(everyone()), asyncio.ensure_future(stop.wait())]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for task in done:
            task.result()

    async def _send(self, pick: Pick, due: float, began: float, was_ready: bool, give_up: float) -> Outcome:
        """One request to its end, whatever that is. Nothing a server does is raised."""
        self._number += 1
        ready = self._ready[pick.kind][pick.sample]
        trace = f"{self.trace}-{self._number}"
        left_s = give_up - began
        if left_s <= 0:
            await asyncio.sleep(0)
            failure = f"not sent within {self._timeout_s:g} s of when it was due: every connection was busy"
            return Outcome(trace, due, began, began, was_ready, failure, given_up=True)
        headers = {
            **ready.headers,
            "X-Request-Id": trace,
            # W3C Trace Context: version, trace, span, sampled.
            "traceparent": f"00-{self.trace}{self._number:016x}-{self._number:016x}-01",
        }
        received, failure, given_up = 0, "", False
        try:
            if self._streams is not None:
                asked = self._streams.ask(ready.message, trace)
                received, failure = await asyncio.wait_for(asked, left_s)
            else:
                received, failure = await self._post(ready, headers, left_s)
        except asyncio.TimeoutError:
            failure, given_up = f"no answer within {self._timeout_s:g} s of when it was due", True
        except (aiohttp.ClientError, OSError) as error:
            failure = _reason(error)
        ended = self._loop.time()
        return Outcome(trace, due, began, ended, was_ready, failure, given_up, ready.size, received)

    async def _post(self, ready: _Ready, headers: dict[str, str], left_s: float) -> tuple[int, str]:
        """(bytes received, why it failed). Raises what aiohttp does where there is no answer."""
        received, message = 0, b""
        async with self._session.post(
            ready.url, data=ready.payload, headers=headers, allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=left_s, ceil_threshold=_NEVER_ROUND),
        ) as response:  # fmt: skip
            async for chunk in response.content.iter_any():
                received += len(chunk)
                if response.status != 200 and len(message) < _ERROR_BYTES:
                    message += chunk
        return received, "" if response.status == 200 else failure_of(response.status, message)


@dataclass(frozen=True)
class _Ready:
    """A message as aiohttp sends it, made once."""

    message: Message
    url: URL
    payload: aiohttp.BytesPayload
    headers: dict[str, str]
    size: int

    @classmethod
    def of(cls, base: URL, message: Message) -> _Ready:
        payload = aiohttp.BytesPayload(message.body, content_type=message.headers["Content-Type"])
        url = base.join(URL(message.path, encoded=True))
        return cls(message, url, payload, message.headers, len(message.body))


def _reason(error: Exception) -> str:
    """Why there was no answer, in words that are the same each time."""
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS failed ({type(error).__name__})"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {_strerror(error.os_error)}"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError)):
        return "the connection was lost before the answer was whole"
    if isinstance(error, OSError):
        return f"the connection failed: {_strerror(error)}"
    return f"the answer is not HTTP ({type(error).__name__})"


def _strerror(error: OSError) -> str:
    """The system's own words: asyncio's hold addresses."""
    known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return (known or str(error) or type(error).__name__).lower()


@contextlib.asynccontextmanager
async def session_of(connections: int, credentials: Credentials | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """At most so many connections, each kept alive; no compression, no cookies, no proxy."""
    credentials = credentials or Credentials()
    connector = aiohttp.TCPConnector(limit=connections, ttl_dns_cache=None, ssl=credentials.context())
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
        skip_auto_headers=_NO_HEADERS, headers={"User-Agent": "tightfit-agent bench", **credentials.headers},
    ) as session:  # fmt: skip
        yield session


class _Server(msgspec.Struct):
    extensions: list[str] = []


async def metadata_of(session: aiohttp.ClientSession, base: URL, path: str, timeout_s: float) -> tuple[Metadata, bool]:
    """(what the server says of the model, whether it takes raw tensors). Raises TightfitError."""
    metadata = await _get(session, base, path, Metadata, timeout_s)
    server = await _get(session, base, "/v2", _Server, timeout_s)
    return metadata, "binary_tensor_data" in server.extensions


async def _get(session: aiohttp.ClientSession, base: URL, path: str, kind: type[T], timeout_s: float) -> T:
    url = base.join(URL(path, encoded=True))
    try:
        async with session.get(url, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            body = await response.content.read(_METADATA_BYTES)
            while chunk := await response.content.read(_METADATA_BYTES):
                body += chunk
                if len(body) > _METADATA_BYTES:
                    raise TightfitError(f"GET {url} has more than {_METADATA_BYTES} bytes")
    except asyncio.TimeoutError:
        raise TightfitError(f"GET {url}: no answer within {timeout_s:g} s", "is the server well?") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TightfitError(f"GET {url}: {_reason(error)}", "is the server started?") from None
    if response.status != 200:
        raise TightfitError(f"GET {url}: {failure_of(response.status, body)}", "is this the model's URL?")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TightfitError(f"GET {url}: not of the Open Inference Protocol: {error}") from None
