"""Those who follow what a model answers, or what happens to models: a response that goes on for days."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from msgspec import structs

from agent.calls import Call
from agent.errors import Reason, RefusedError
from agent.feed import Feed, Follower
from agent.http.codecs import OutputTensor
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Lost, Record, Timing, answer, failure, overflow
from agent.http.pictures import Pictures
from agent.http.sink import PIECE_BYTES, Sink, SlowReaderError
from agent.http.stream_calls import timing_of
from agent.journal import Happening
from agent.results import ENTRY_BYTES, Closed, Kept, Missed, Policy, Position, Results, parse_position
from agent.served import Entry
from targets.errors import ContractError, did_you_mean

T = TypeVar("T")
Encode = Callable[[Encoder, Kept[T]], tuple[Record, list[memoryview]]]
"""A result as a record, and its raw tensors."""

# What Python keeps of an output beside its bytes: array, shape, and what describes it.
_OUTPUT_BYTES = 512
# Many small results in the ring; bytes bound it where they are larger.
_ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client was answered, in copies; `too_large` says of one that could not be kept how large it was."""

    id: str | None
    name: str
    version: str
    outputs: Sequence[OutputTensor]
    timing: Timing
    too_large: str = ""
    sha256: str = ""
    """Of what it was asked, where somebody wants to know."""

    @property
    def nbytes(self) -> int:
        return len(self.id or "") + sum(_OUTPUT_BYTES + output.data.nbytes for output in self.outputs)


class ResultFeeds:
    """The newest results of every model for which the configuration says that they may be followed."""

    def __init__(self, epoch: str, patience_s: float, send_s: float) -> None:
        self._epoch, self._patience_s = epoch, patience_s
        self.pictures = Pictures(epoch, send_s)
        self._feeds: dict[str, Feed[Shown]] = {}
        self.digested: Counter[str] = Counter()
        """How many want to know what the results of a model were asked."""

    def of(self, entry: Entry) -> Feed[Shown]:
        """Those of a model. Raises RefusedError where nobody may follow it."""
        limit = entry.options.results_bytes
        if not limit:
            raise RefusedError(
                Reason.CONTROL_DISABLED,
                f"results of model {entry.name!r} are not shown",
                "they are the answers to all clients: set results_mib for it under [[models]] where that is wanted",
            )
        feed = self._feeds.get(entry.name)
        if feed is None:
            results: Results[Shown] = Results(self._epoch, limit, _ENTRIES, self._patience_s)
            feed = self._feeds[entry.name] = Feed(results, time.monotonic)
        feed.results.limit_bytes = limit
        return feed

    async def publish(
        self,
        call: Call,
        id: str | None,  # noqa: A002 - the protocol's word
        outputs: Sequence[OutputTensor],
        picture: bytes | memoryview | None = None,
    ) -> None:
        """Show what a call is answered, when those who block have room for it, and the image that it is about."""
        served, _ = call.seat
        if not served.entry.options.results_bytes:
            return
        feed = self.of(served.entry)
        sha256 = await _digest(call, picture) if self.digested[served.name] else ""
        shown = Shown(id, served.name, served.version, outputs, timing_of(call), sha256=sha256)
        room = feed.results.limit_bytes - ENTRY_BYTES
        if shown.nbytes > room:
            shown = replace(shown, id=None, outputs=(), too_large=f"{shown.nbytes} bytes, and {room} are kept of all")
        else:
            copies = [structs.replace(each, data=np.array(each.data)) for each in outputs]
            shown = replace(shown, outputs=copies)
        await feed.put_when_possible(shown, shown.nbytes)
        if picture is not None:
            # Nothing else has run since it was numbered.
            self.pictures.keep(served.entry, feed.results.newest, picture)

    def sizes(self) -> list[tuple[str, float]]:
        """Bytes that are kept, by model."""
        return [(name, feed.results.nbytes) for name, feed in list(self._feeds.items())]


async def _digest(call: Call, picture: bytes | memoryview | None) -> str:
    """SHA-256 of the encoded image, or of the inputs in the call's slot, one behind the other."""
    served, slot = call.seat
    parts = [picture] if picture is not None else [
        served.slab.input(slot, index)[:nbytes].data for index, nbytes in enumerate(call.inputs)
    ]  # fmt: skip

    def work() -> str:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return digest.hexdigest()

    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))


class Following(Generic[T]):
    """One who follows a feed. Made in its handler, which is `run`."""

    def __init__(
        self,
        request: web.Request,
        feed: Feed[T],
        encoder: Encoder,
        encode: Encode[T],
        heartbeat_s: float,
        send_s: float,
    ) -> None:
        """Raises ContractError for a query that is not valid."""
        self._feed, self._policy, self._since = feed, _policy(request), _since(request)
        if self._policy is Policy.BLOCK and feed.results.patience_s == 0:
            raise ContractError("nothing waits for a reader here", "policy=latest or policy=close")
        # What it did not read stays in the feed, which is what its policy is about, so little is sent ahead.
        self._sink = Sink(request, encoder, PIECE_BYTES, send_s)
        self._encoder, self._encode, self._heartbeat_s = encoder, encode, heartbeat_s
        self._follower: Follower[T] | None = None
        self._last: RefusedError | None = None

    async def run(self) -> web.StreamResponse:
        """Serve it until the client goes, or is too slow, or the agent stops."""
        follower = self._follower = self._feed.follow(self._policy, self._since)
        try:
            await self._sink.open()
            last = await self._follow(follower)
            await self._sink.close(self._encoder.encode(last))
        except SlowReaderError:
            self._sink.abort()
        finally:
            follower.close()
        return self._sink.response

    def stop(self, reason: Reason, message: str) -> None:
        """End it with a record that says why."""
        self._last = RefusedError(reason, message)
        if self._follower is not None:
            self._follower.ring()

    async def _follow(self, follower: Follower[T]) -> Record:
        """Write all that comes; the record that is to be the last."""
        while self._last is None:
            taken = follower.take()
            if isinstance(taken, Kept):
                await self._write(taken)
            elif isinstance(taken, Missed):
                count = taken.last + 1 - taken.first
                await self._sink.write(self._encoder.encode(Lost(taken.first, taken.last, count, taken.restarted)))
            elif isinstance(taken, Closed):
                return overflow(taken.since)
            else:
                left_s = self._sink.wrote_at + self._heartbeat_s - time.monotonic()
                if left_s <= 0:
                    await self._sink.heartbeat()
                else:
                    await follower.wait(left_s)
        return failure(follower.last, None, self._last)

    async def _write(self, kept: Kept[T]) -> None:
        record, raw = self._encode(self._encoder, kept)
        head = self._encoder.encode(record, raw)
        if sum(view.nbytes for view in raw) < PIECE_BYTES:
            await self._sink.write(b"".join([head, *raw]))
        else:
            await self._sink.write_pieces([memoryview(head), *raw])


def shown_record(encoder: Encoder, kept: Kept[Shown]) -> tuple[Record, list[memoryview]]:
    """A result in the form that the framing has for tensors; an error where it has none for these."""
    shown = kept.value
    if shown.too_large:
        return failure(kept.seq, None, RefusedError(Reason.TOO_LARGE, shown.too_large)), []
    outputs = [structs.replace(each, binary=encoder.binary) for each in shown.outputs]
    try:
        return answer(kept.seq, shown.id, shown.name, shown.version, outputs, shown.timing)
    except RefusedError as error:
        return failure(kept.seq, shown.id, error, shown.timing), []


def happening_record(_: Encoder, kept: Kept[Happening]) -> tuple[Record, list[memoryview]]:
    """What happened, under its number."""
    return msgspec.structs.replace(kept.value, seq=kept.seq), []


def _policy(request: web.Request) -> Policy:
    text = request.query.get("policy", Policy.LATEST.value)
    try:
        return Policy(text)
    except ValueError:
        raise ContractError(f"policy {text[:40]!r}", did_you_mean(text[:40], [each.value for each in Policy])) from None


def _since(request: web.Request) -> Position | None:
    """A client that reconnects by itself repeats its first query, so what it says of its last event goes before."""
    text = request.headers.get("Last-Event-ID") or request.query.get("since")
    return None if text is None else parse_position(text)
