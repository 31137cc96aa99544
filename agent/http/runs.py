"""What handlers do with a call that holds a slot: run tensors or an image, and keep long work off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from numpy.typing import NDArray

from agent.calls import Call
from agent.gateway import Gateway
from agent.http.codecs import Payload
from agent.http.tensors import OFF_LOOP_RAW_BYTES, Tensor, raw_of
from agent.images import Images
from agent.request import Result
from agent.sequences import LongRequest, Shapes, is_long
from agent.served import Served

T = TypeVar("T")
# Parsing is Python work under one interpreter lock: more threads would only take turns.
_THREADS = 2


class Runs:
    """Runs over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._threads = ThreadPoolExecutor(_THREADS, "codec")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    async def tensors(
        self, call: Call, shapes: Shapes, payloads: Sequence[Payload], outputs: tuple[int, ...]
    ) -> list[Tensor]:
        """The outputs, in that order, for inputs that are not in the slot yet. They stand in it until it is given back,
        or, of a long sequence, outside."""
        served, slot = call.seat
        if is_long(served.model.contract, shapes):
            return [(array.shape, raw_of(array)) for array in await self.long(call, shapes, payloads, outputs)]
        quick = sum(map(len, payloads)) < OFF_LOOP_RAW_BYTES
        nbytes = await self.in_turn(quick, write, served, slot, payloads)
        return outputs_in(served, slot, await self._gateway.infer(call, shapes, nbytes, outputs))

    async def long(
        self, call: Call, shapes: Shapes, payloads: Sequence[Payload], outputs: tuple[int, ...]
    ) -> list[NDArray[Any]]:
        """The outputs for a sequence that is longer than the engine runs at once."""
        served, slot = call.seat
        long = LongRequest(served.model.contract, shapes, payloads, outputs)
        self._gateway.foresee(call, len(long.windows))
        for window in long.windows:
            seen, nbytes = await self.off_loop(long.fill, window, served.slab, slot)
            result = await self._gateway.infer(call, seen, nbytes, outputs)
            await self.off_loop(long.take, window, result, served.slab, slot)
        return await self.off_loop(long.answer)

    async def image(self, call: Call, images: Images, image: bytes) -> dict[str, NDArray[Any]]:
        """The answer to an encoded image."""
        served, slot = call.seat
        filled = await self.off_loop(images.fill, image, served.slab, slot, threads=images.thread)
        result = await self._gateway.infer(call, (filled.shape,), (filled.nbytes,), images.outputs)
        return await self.off_loop(images.answer, result, served.slab, slot, filled, threads=images.thread)

    async def in_turn(self, quick: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call it: here when that takes no time, in a thread otherwise."""
        if quick:
            return function(*arguments)
        return await self.off_loop(function, *arguments)

    async def off_loop(self, function: Callable[..., T], *arguments: Any, threads: Executor | None = None) -> T:
        """Call it in a thread."""
        future = asyncio.get_running_loop().run_in_executor(threads or self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and the slot must not be released while one works in it.
            await asyncio.wait([future])
            raise


def write(served: Served, slot: int, payloads: Sequence[Payload]) -> tuple[int, ...]:
    """Put inputs into the slot: the bytes of each."""
    for index, payload in enumerate(payloads):
        served.slab.put(slot, index, payload)
    return tuple(len(payload) for payload in payloads)


def outputs_in(served: Served, slot: int, result: Result) -> list[Tensor]:
    """What the engine left in the slot."""
    return [(each.shape, served.slab.output(slot, each.index)[: each.nbytes]) for each in result.outputs]
