"""One long-lived stream of requests: records come in, and for each a record goes out, in the order in which they came.

Theory of operation. A task reads: it takes the next record when fewer than so many are on their way, has it admitted
like a request of its own, and only then looks for the one behind it. So what waits without a slot is one small record,
and the socket holds back the others; a large one has its slot before the rest of it is read, as the body of a request
has. Admitted records run side by side, each in a task where it waits for more than the engine, and so become batches.
What is done is written in turn by the handler: small outputs are copied out of their slot at once, large ones wait in
it.

    socket --> decoder --> one at the door --> up to `in_flight` in slots --> in turn --> unread bytes --> socket
                                    each a Call, settled exactly once

The stream ends with its body, with bytes of which nobody knows what they are, by its limits, or with the agent; then
what was admitted is answered first. When the client goes all of its calls are given up, and what is queued never runs.
A model that is reloaded, or an engine that dies, ends no stream: the next record goes to whatever is there then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import StreamReader, web

from agent import log
from agent.bell import Bell
from agent.calls import Call
from agent.config import Http, Limits, StreamOptions
from agent.errors import Reason, RefusedError
from agent.http.codecs import OutputTensor
from agent.http.framing.decoder import Decoder, FramingError, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import failure, overflow
from agent.http.sink import PIECE_BYTES, Sink, SlowReaderError
from agent.http.stream_calls import Admitted, StreamCalls, timing_of
from agent.limits.pace import Pace
from targets.errors import TightfitError

T = TypeVar("T")

# So much is held of a record that has no slot.
_AHEAD_BYTES = 64 << 10


@dataclass(eq=False, slots=True)
class _Item:
    """A record on its way. What goes out in its turn is `data`, or, where that is much, made of `tensors`, which stand
    in the slot of `call` until then."""

    seq: int
    call: Call | None = None
    id: str | None = None
    data: bytes = b""
    tensors: Sequence[OutputTensor] = ()
    done: bool = False


class Stream:
    """One exchange. Made in its handler, which is `run`."""

    def __init__(
        self,
        request: web.Request,
        calls: StreamCalls,
        decoder: Decoder,
        encoder: Encoder,
        options: StreamOptions,
        http: Http,
        limits: Limits,
    ) -> None:
        self._content, self._calls = request.content, calls
        self._decoder, self._encoder, self._options, self._http = decoder, encoder, options, http
        self._limits = limits
        self._log = log.get("stream")
        self._sink = Sink(request, encoder, options.unread_kib << 10, options.patience_s)
        # For the handler: something is done. For the task that reads: there is room.
        self._done, self._room = Bell(), Bell()
        self._tick_s = min(options.heartbeat_s, options.idle_s, http.body_s, limits.pace_s) / 4
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._items: deque[_Item] = deque()
        self._coming: _Item | None = None
        """The record that is being read, where it has a slot already."""
        self._taken = self._sent = 0
        """Numbers of the last record that came, and of the last that was answered."""
        self._read_at = time.monotonic()
        self._pace: Pace | None = None
        """That of a record of which a part is there, and `_came` bytes of it."""
        self._came = 0
        self._waits_for_input = False
        self._body_ended = False
        self._ended = False
        """Whether nothing more is taken."""
        self._stop: RefusedError | None = None
        self._last = b""

    async def run(self) -> web.StreamResponse:
        """Serve it to its end."""
        await self._sink.open()
        self._reading = asyncio.create_task(self._read())
        try:
            await self._write()
            await self._sink.close(self._last)
        except SlowReaderError:
            await self._overflow()
        finally:
            await self._give_up(Reason.DISCONNECTED)
        return self._sink.response

    def stop(self, reason: Reason, message: str) -> None:
        """Take no more records, and end with one that says why, when those that were taken are answered."""
        if self._stop is None and not self._ended:
            self._stop = RefusedError(reason, message)
            if self._waits_for_input and self._reading is not None:
                self._reading.cancel()

    # --- in

    async def _read(self) -> None:
        """Take records, each when there is room for it, until there are no more."""
        try:
            while self._stop is None:
                if len(self._items) >= self._options.in_flight and self._coming is None:
                    with self._not_reading():
                        await self._input(self._room.wait())
                elif not await self._take():
                    return
        except asyncio.CancelledError:
            if self._stop is None:
                raise
        except ConnectionError:
            # The handler is cancelled as well.
            raise
        except Exception as error:  # noqa: BLE001 - answered and logged; the server goes on
            self._log.exception("a stream failed")
            self.stop(Reason.FAULT, f"the server failed: {type(error).__name__}")
        finally:
            if self._stop is not None and self._coming is not None:
                self._fail(self._coming, self._stop)
            elif self._stop is not None:
                self._last = self._encoder.encode(failure(self._taken + 1, None, self._stop))
            self._ended = True
            self._done.ring()

    async def _take(self) -> bool:
        """Begin the next record, or receive more of it; False when there are none."""
        try:
            message = self._decoder.next()
        except FramingError as error:
            item = self._next_item()
            # It is counted as any request is.
            item.call = item.call or self._calls.open()
            self._fail(item, error)
            return not error.fatal
        if message is not None:
            await self._begin(message)
        elif self._body_ended:
            return False
        elif self._decoder.held > _AHEAD_BYTES and self._coming is None:
            await self._prepare()
        else:
            await self._receive()
        return True

    async def _receive(self) -> None:
        """Feed the decoder what comes next, or that nothing does."""
        if self._decoder.begun and self._pace is None:
            self._came = 0
            limits = self._limits
            self._pace = Pace(self._http.body_s, limits.bytes_per_s, limits.pace_s, time.monotonic())
        try:
            data = await self._input(self._content.readany())
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the parser of the transfer coding raises
            self.stop(Reason.BAD_REQUEST, f"the body is not valid: {type(error).__name__} {error}"[:200])
            return
        self._read_at = time.monotonic()
        self._came += len(data)
        self._decoder.feed(data)
        if self._content.at_eof():
            self._body_ended = True
            self._decoder.end()

    @contextlib.contextmanager
    def _not_reading(self) -> Iterator[None]:
        """It is the agent that does not read meanwhile, and no fault of the client's."""
        began, pace, self._pace = time.monotonic(), self._pace, None
        try:
            yield
        finally:
            if pace is not None:
                pace.stood_still(time.monotonic() - began)
            self._pace = pace

    async def _input(self, waits: Coroutine[Any, Any, T]) -> T:
        """Wait for the client. This is where a stop ends the task that reads, and nowhere else."""
        self._waits_for_input = True
        try:
            return await waits
        finally:
            self._waits_for_input = False

    def _next_item(self) -> _Item:
        """The place of the record that has come, whatever it is."""
        self._pace = None
        item, self._coming = self._coming, None
        return item or self._new_item()

    def _new_item(self) -> _Item:
        self._taken += 1
        item = _Item(self._taken)
        self._items.append(item)
        return item

    async def _prepare(self) -> None:
        """Have a large record admitted before more of it is read. What is refused is left out, and never in memory."""
        item = self._new_item()
        call = item.call = self._calls.open()
        try:
            with self._not_reading():
                await self._calls.seat(call)
        except BaseException as error:  # noqa: BLE001 - that of a cancelled task goes on
            self._decoder.skip()
            self._pace = None
            self._fail(item, error)
        else:
            self._coming = item

    async def _begin(self, message: Message) -> None:
        """Have a record admitted, its tensors in a slot, and run from there on by itself."""
        item = self._next_item()
        call = item.call = item.call or self._calls.open()
        # Large ones were opened when they began.
        call.arrived = time.monotonic()
        item.id = message.id
        try:
            request = await self._calls.decode(call, message)
            item.id = message.id if request is None else request.id
            admitted = await self._calls.admit(call, message, request)
            item.id = admitted.request.id
            if self._calls.begin(call, admitted, partial(self._answered, item, admitted)):
                return
        except BaseException as error:  # noqa: BLE001 - that of a cancelled task goes on
            self._fail(item, error)
            return
        # It begins when this task waits: what came together is then asked together, and is one batch.
        task = asyncio.create_task(self._finish(item, call, admitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what runs

    async def _finish(self, item: _Item, call: Call, admitted: Admitted) -> None:
        """Run an admitted record and make its answer."""
        try:
            self._made(item, call, await self._calls.run(call, admitted))
        except BaseException as error:  # noqa: BLE001 - that of a cancelled task goes on
            self._fail(item, error)

    def _answered(self, item: _Item, admitted: Admitted, result: Any, error: RefusedError | None) -> None:
        """The same of one that waited for nothing but the engine, and so has no task: `result` is there, or `error`."""
        call = item.call
        if call is None:
            return
        try:
            if error is not None:
                raise error
            self._made(item, call, self._calls.outputs(call, admitted, result))
        except Exception as failed:  # noqa: BLE001 - answered, and logged where it is ours; the server goes on
            self._fail(item, failed)

    def _made(self, item: _Item, call: Call, tensors: Sequence[OutputTensor]) -> None:
        """Its outputs stand in the slot, and stay there where they are large."""
        if sum([tensor.data.nbytes for tensor in tensors]) < PIECE_BYTES:
            head, raw = self._calls.encode_here(item.seq, item.id, call, tensors)
            item.data = b"".join([head, *raw])
            self._settle(item, Reason.OK)
        else:
            item.tensors = tensors
        self._is_done(item)

    def _fail(self, item: _Item, error: BaseException) -> None:
        """Answer the record with an error. Raises it when nobody is there to be answered."""
        if isinstance(error, asyncio.CancelledError | ConnectionError):
            self._settle(item, Reason.DISCONNECTED)
            raise error
        if not isinstance(error, TightfitError):
            self._log.error("a record of a stream failed", exc_info=error)
            error = RefusedError(Reason.FAULT, f"the server failed: {type(error).__name__}")
        record = failure(item.seq, item.id, error, None if item.call is None else timing_of(item.call))
        item.data, item.tensors = self._encoder.encode(record), ()
        self._settle(item, Reason(record.reason), record.error)
        self._is_done(item)

    def _settle(self, item: _Item, reason: Reason, message: str = "") -> None:
        if item.call is not None:
            call, item.call = item.call, None
            self._calls.settle(call, reason, message)

    def _is_done(self, item: _Item) -> None:
        item.done = True
        self._done.ring()

    # --- out

    async def _write(self) -> None:
        """Write what is done in its turn, and heartbeats in between, until there is nothing more."""
        while not self._ended or self._items:
            if self._items and self._items[0].done:
                await self._write_done()
                continue
            now = time.monotonic()
            self._check_limits(now)
            if now - self._sink.wrote_at >= self._options.heartbeat_s:
                await self._sink.heartbeat()
            await self._done.wait(self._tick_s)

    async def _write_done(self) -> None:
        """Write what is done, small records together."""
        parts: list[bytes] = []
        size = 0
        while self._items and self._items[0].done and size < PIECE_BYTES:
            item = self._items[0]
            if item.tensors:
                if parts:
                    break
                await self._write_large(item)
            self._items.popleft()
            self._room.ring()
            parts.append(item.data)
            size += len(item.data)
            self._sent = item.seq
        await self._sink.write(b"".join(parts))

    async def _write_large(self, item: _Item) -> None:
        """Write tensors out of their slot, which they hold until all of them left."""
        if item.call is None:
            raise RuntimeError(f"record {item.seq} holds no slot")
        try:
            head, raw = await self._calls.encode(item.seq, item.id, item.call, item.tensors)
        except TightfitError as error:
            self._fail(item, error)
            return
        try:
            await asyncio.wait_for(self._sink.write_pieces([memoryview(head), *raw]), self._http.send_s)
        except (SlowReaderError, TimeoutError, asyncio.TimeoutError):
            # Within a record nothing else can be said.
            self._settle(item, Reason.SLOW_READER, "the answer was not taken in time")
            self._sink.abort()
            raise ConnectionResetError("the client does not read") from None
        item.tensors = ()
        self._settle(item, Reason.OK)

    def _check_limits(self, now: float) -> None:
        """End a stream whose client is silent, or slow within a record."""
        if not self._waits_for_input:
            return
        if self._pace is not None and (missed := self._pace.too_slow(self._came, now)):
            self.stop(Reason.SLOW_BODY, f"a record did not arrive {missed}")
        elif not self._items and now - self._read_at >= self._options.idle_s:
            self.stop(Reason.SLOW_BODY, f"nothing came for {self._options.idle_s:g} s, not even a heartbeat")

    # --- the end

    async def _overflow(self) -> None:
        """End it with a record for a client that does not read. What it sends meanwhile is dropped, so that it comes to
        read."""
        self._log.info("a client reads too slowly", model=self._calls.name, taken=self._taken, answered=self._sent)
        await self._give_up(Reason.SLOW_READER)
        dropping = asyncio.create_task(_drop(self._content))
        try:
            await self._sink.close(self._encoder.encode(overflow(self._sent)), self._http.send_s)
            # All of it may be in the kernel's buffers, and the client about to send more before it reads.
            await asyncio.wait([dropping], timeout=self._http.send_s)
        finally:
            dropping.cancel()
            await asyncio.wait([dropping])

    async def _give_up(self, reason: Reason) -> None:
        """End what goes on; what is queued is never run."""
        # By a task of its own: the handler may be cancelled once more, as its connection is lost only now, and what is
        # not settled holds its slot for ever.
        await asyncio.shield(asyncio.create_task(self._settle_all(reason)))

    async def _settle_all(self, reason: Reason) -> None:
        tasks = [*self._tasks, *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Also of a task that was cancelled before it began.
        for item in self._items:
            self._settle(item, reason)
        self._items.clear()


async def _drop(content: StreamReader) -> None:
    with contextlib.suppress(Exception):
        while not content.at_eof():
            await content.readany()
