"""Sequences: requests that go on from the state which the one before left (Triton's sequence extension).

Theory of operation. A request that begins a sequence leaves its slot to it, with the state in it; each that follows
gives back the slot that it came with and has the sequence's instead, until it is answered. So what is in memory is what
the plan counted, and one slot of a model is never a sequence's, or nobody could send the next request.

A sequence ends with the request that says so; with one that fails or whose client goes, since nobody knows then what
its state is of; when nobody asked for a while; and when its version is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from agent.calls import Call
from agent.errors import Reason, RefusedError
from agent.gateway import Gateway
from agent.request import Part, Result
from agent.served import Served
from agent.state import SlotState

Payload = bytes | memoryview
Key = tuple[str, int | str]


@dataclass(eq=False, slots=True)
class _Open:
    """A sequence, and who its slot is leased to while none of its requests runs."""

    served: Served
    slot: int
    owner: int
    state: SlotState
    busy: bool = True
    leaves: bool = False
    timer: asyncio.TimerHandle | None = None


class Sequences:
    """All that are open over one gateway."""

    def __init__(self, gateway: Gateway, idle_s: float) -> None:
        self._gateway, self._idle_s = gateway, idle_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[Key, _Open] = {}
        # Calls are numbered upwards.
        self._owners = itertools.count(-1, -1)
        gateway.on_leave.append(self._leave)

    @contextlib.asynccontextmanager
    async def run(
        self,
        call: Call,
        part: Part,
        shapes: Sequence[tuple[int, ...]],
        payloads: Sequence[Payload],
        outputs: Sequence[int],
    ) -> AsyncIterator[Result]:
        """Run a request of a sequence: `shapes` and `payloads` of all inputs that are no state, in their order, and
        `outputs` by index. What it gives stands in the sequence's slot until the block ends. Raises RefusedError, or
        ContractError where they do not go with state as it is."""
        served, _ = call.seat
        key = served.key, part.id
        one = self._begin(call, key) if part.start else self._resume(call, key)
        kept = False
        try:
            given = [index for index in range(len(served.model.contract.inputs)) if index not in one.state.shapes]
            step = one.state.step(dict(zip(given, shapes, strict=True)), outputs)
            specs = served.model.contract.inputs
            served.model.contract.check_inputs(
                {spec.name: (spec.dtype, shape) for spec, shape in zip(specs, step.shapes, strict=True)}
            )
            for index, payload in zip(given, payloads, strict=True):
                served.slab.input(one.slot, index)[: len(payload)] = np.frombuffer(payload, np.uint8)
            result = await self._gateway.step(call, *step)
            one.state.take(result)
            yield result
            kept = not (part.end or one.leaves)
        finally:
            one.busy = False
            if kept:
                self._gateway.leave_slot(call, one.owner)
                one.timer = self._loop.call_later(self._idle_s, self._end, key, one)
            else:
                # Its slot goes with the call.
                del self._open[key]

    def _begin(self, call: Call, key: Key) -> _Open:
        served, slot = call.seat
        before = self._open.get(key)
        if before is not None:
            self._check_idle(before, key)
            self._end(key, before)
        others = sum(each.served is served for each in self._open.values())
        if others >= served.pool.slots - 1:
            raise RefusedError(
                Reason.QUEUE_FULL,
                f"{others} sequences of model {served.name!r} are open, as many as {served.pool.slots} slots allow",
                "end one, or compile the model with more --slots",
            )
        one = _Open(served, slot, next(self._owners), SlotState(served.model.contract, served.slab, slot))
        self._open[key] = one
        return one

    def _resume(self, call: Call, key: Key) -> _Open:
        one = self._open.get(key)
        if one is None:
            raise RefusedError(
                Reason.BAD_REQUEST,
                f"no sequence {key[1]!r} is open",
                f"begin it with sequence_start; one that is idle for {self._idle_s:g} s is ended",
            )
        self._check_idle(one, key)
        if one.timer is not None:
            one.timer.cancel()
        one.busy = True
        self._gateway.move_to(call, one.slot, one.owner)
        return one

    def _check_idle(self, one: _Open, key: Key) -> None:
        if one.busy:
            raise RefusedError(
                Reason.BAD_REQUEST, f"a request of sequence {key[1]!r} is not answered yet", "send one after the other"
            )

    def _end(self, key: Key, one: _Open) -> None:
        if one.timer is not None:
            one.timer.cancel()
        del self._open[key]
        self._gateway.give_back(one.served, one.slot, one.owner)

    def _leave(self, served: Served) -> None:
        """End all sequences of a version that is replaced; what runs is answered first."""
        for key, one in [item for item in self._open.items() if item[1].served is served]:
            one.leaves = True
            if not one.busy:
                self._end(key, one)
