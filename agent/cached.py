"""A version's engine with its answers kept: what was computed for a request before is not computed again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from agent.cache import Answer, ResponseCache, key_of
from agent.calls import Call
from agent.engine.channel import Slab
from agent.errors import RefusedError
from agent.request import Request, Result
from agent.scheduling.queue import EXPIRED

Run = Callable[[], Awaitable[Result]]
# What is hashed here keeps the event loop for half a millisecond at most; a hop to a thread costs a tenth.
_ON_LOOP_BYTES = 256 << 10


class Cached:
    """Answers of the version with that digest, at most `limit_bytes` of them.

    Equal requests that come while one of them runs wait for it, if it is no less important and due no later than they
    are: so nobody waits longer than for a run of his own. When it fails they run themselves.
    """

    def __init__(self, digest: str, slab: Slab, limit_bytes: int) -> None:
        self.answers = ResponseCache(limit_bytes)
        self._digest, self._slab = digest, slab
        self._leading: dict[bytes, tuple[Call, list[Call]]] = {}

    async def infer(self, call: Call, request: Request, run: Run) -> Result:
        """The answer to what stands in the slot, kept or run, in the slot's outputs. Raises what `run` raises."""
        slot, started = request.slot, time.monotonic()
        inputs = [self._slab.input(slot, index)[:size].data for index, size in enumerate(request.nbytes)]
        if sum(request.nbytes) <= _ON_LOOP_BYTES:
            key = key_of(self._digest, request.shapes, inputs, request.outputs)
        else:
            key = await asyncio.to_thread(key_of, self._digest, request.shapes, inputs, request.outputs)
        call.cache_s += time.monotonic() - started
        await self._wait_for_equal(key, call)
        started = time.monotonic()
        answer = self.answers.get(key)
        call.cache_hit = answer is not None
        if answer is None:
            return await self._run(key, call, slot, run)
        for output, tensor in zip(answer.outputs, answer.tensors, strict=True):
            self._slab.output(slot, output.index)[: output.nbytes].data[:] = tensor
        call.cache_s += time.monotonic() - started
        return Result(answer.outputs)

    async def _wait_for_equal(self, key: bytes, call: Call) -> None:
        """Wait until an equal request that runs first has ended, however it did."""
        leader, followers = self._leading.get(key, (None, []))
        if leader is None or leader.priority > call.priority or leader.deadline > call.deadline:
            return
        followers.append(call)
        try:
            await asyncio.wait_for(call.answered(), max(call.deadline - time.monotonic(), 0))
        except (TimeoutError, asyncio.TimeoutError):
            raise RefusedError(EXPIRED.reason, EXPIRED.message) from None

    async def _run(self, key: bytes, call: Call, slot: int, run: Run) -> Result:
        leads = key not in self._leading
        if leads:
            self._leading[key] = call, []
        try:
            result = await run()
            started = time.monotonic()
            tensors = tuple(self._slab.output(slot, each.index)[: each.nbytes].tobytes() for each in result.outputs)
            self.answers.put(key, Answer(result.outputs, tensors))
            call.cache_s += time.monotonic() - started
        finally:
            if leads:
                for follower in self._leading.pop(key)[1]:
                    follower.resolve()
        return result
