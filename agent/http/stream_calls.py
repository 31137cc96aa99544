"""A record of a stream as a call of its own: admitted, decoded into its slot, and run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from agent.calls import Call, Hear
from agent.errors import Reason, RefusedError
from agent.gateway import Gateway
from agent.http.codecs import InferRequest, OutputTensor
from agent.http.framing.decoder import Decoder, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Timing, answer
from agent.http.framing.requests import RequestReader
from agent.http.runs import Runs, outputs_in, write
from agent.http.tensors import OFF_LOOP_BYTES, OFF_LOOP_RAW_BYTES, answered, is_quick, wished
from agent.repository import Repository, no_version
from agent.request import Result
from agent.sequences import is_long
from agent.served import Served
from agent.strings import unpack_strings

Publish = Callable[[Call, str | None, Sequence[OutputTensor], bytes | memoryview | None], Awaitable[None]]
"""Show a result, and the image that it is about, to those who follow the model's, waiting for them where they asked for
that."""


@dataclass(frozen=True)
class Target:
    """What a stream asks: a model, in the version that is active or in one alone, and how urgent its records are where
    they do not say it themselves. `largest` says how many bytes a record of a version can have; `echo` are the ids that
    the client gave the exchange."""

    name: str
    version: str | None
    client: str
    priority: int
    timeout_s: float | None
    largest: Callable[[Served], int]
    echo: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Admitted:
    """A request without what was written into its slot, and bytes of each input there."""

    request: InferRequest
    nbytes: tuple[int, ...] = ()


class StreamCalls:
    """What is done with the records of one stream, one after the other up to their slot and side by side from there."""

    def __init__(
        self,
        target: Target,
        decoder: Decoder,
        encoder: Encoder,
        gateway: Gateway,
        repository: Repository,
        runs: Runs,
        publish: Publish,
    ) -> None:
        self._target, self._decoder, self._encoder = target, decoder, encoder
        self._gateway, self._repository, self._runs, self._publish = gateway, repository, runs, publish
        self._reader: tuple[Served, RequestReader] | None = None
        """What checks records for the version that was asked last."""
        self._images = Evenly()
        self.name = target.name

    def open(self) -> Call:
        """A call for the next record. Whoever opens one must settle it."""
        call = self._gateway.open(self._target.client)
        call.name, call.priority, call.echo = self._target.name, self._target.priority, self._target.echo
        if self._target.timeout_s is not None:
            self._gateway.set_timeout(call, self._target.timeout_s)
        return call

    async def seat(self, call: Call) -> None:
        """Give the call a slot of whichever version is active. Raises RefusedError."""
        target = self._target
        entry = self._repository.find(target.name, target.version)
        if target.version is None:
            entry = self._repository.answering(entry)
        served, _ = await self._gateway.admit(call, entry)
        if target.version not in (None, served.version):
            raise no_version(entry.name, str(target.version), self._repository.versions(entry.name))

    async def decode(self, call: Call, message: Message) -> InferRequest | None:
        """Check a record against what is active now; from here on its call is as urgent as it says. None when nothing
        is. Raises ContractError or RefusedError."""
        served = call.served or self._repository.find(self._target.name, self._target.version).active
        return None if served is None else await self._decode(call, served, message)

    async def admit(self, call: Call, message: Message, request: InferRequest | None) -> Admitted:
        """Put a record into the slot of its call, which is seated first unless it is."""
        if call.served is None:
            await self.seat(call)
        served, slot = call.seat
        if request is None or self._reader is None or self._reader[0] is not served:
            # Another version came while it waited.
            request = await self._decode(call, served, message)
        if request.is_image or is_long(served.model.contract, request.shapes):
            return Admitted(request)
        quick = sum(map(len, request.payloads)) < OFF_LOOP_RAW_BYTES
        nbytes = await self._runs.in_turn(quick, write, served, slot, request.payloads)
        return Admitted(structs.replace(request, payloads=()), nbytes)

    def begin(self, call: Call, admitted: Admitted, hear: Hear) -> bool:
        """Have it run and `hear` the engine's result, or why there is none, where nothing but the engine is waited for:
        whether that is so. Raises RefusedError."""
        served, _ = call.seat
        request = admitted.request
        if request.payloads or served.cached or served.entry.options.results_bytes:
            return False
        self._gateway.submit(call, request.shapes, admitted.nbytes, request.wanted)
        call.then(hear)
        return True

    def outputs(self, call: Call, admitted: Admitted, result: Result) -> list[OutputTensor]:
        """What the engine made of a record, in its slot."""
        served, slot = call.seat
        made = outputs_in(served, slot, result)
        return wished(served.model.contract, admitted.request, made, served.labels)

    async def run(self, call: Call, admitted: Admitted) -> list[OutputTensor]:
        """Its outputs, shown to those who follow the model. They stand in the slot until the call is settled. Raises
        RefusedError or ImageError."""
        served, _ = call.seat
        request = admitted.request
        image = None
        if request.is_image and served.images is not None:
            (image,) = unpack_strings(memoryview(request.payloads[0]), 1)
            made = await self._runs.image(call, served.images, image)
            outputs = await self._runs.off_loop(answered, served.images.contract, request, made)
        elif request.payloads:
            tensors = await self._runs.tensors(call, request.shapes, request.payloads, request.wanted)
            outputs = wished(served.model.contract, request, tensors, served.labels)
        else:
            result = await self._gateway.infer(call, request.shapes, admitted.nbytes, request.wanted)
            outputs = self.outputs(call, admitted, result)
        await self._publish(call, request.id, outputs, image)
        return outputs

    async def encode(
        self,
        seq: int,
        id_: str | None,
        call: Call,
        outputs: Sequence[OutputTensor],
    ) -> tuple[bytes, list[memoryview]]:
        """(the record up to its raw tensors, views of these). Raises RefusedError(NOT_JSON) as `tensors_of` does."""
        size = sum(output.data.nbytes for output in outputs)
        quick = size < OFF_LOOP_BYTES or all(output.binary for output in outputs)
        return await self._runs.in_turn(quick, self.encode_here, seq, id_, call, outputs)

    def encode_here(
        self,
        seq: int,
        id_: str | None,
        call: Call,
        outputs: Sequence[OutputTensor],
    ) -> tuple[bytes, list[memoryview]]:
        """The same of outputs that are small."""
        served, _ = call.seat
        record, raw = answer(seq, id_, served.name, served.version, outputs, timing_of(call))
        return self._encoder.encode(record, raw), raw

    def settle(self, call: Call, reason: Reason, message: str = "") -> None:
        """The end of a call; what it still waits for is given up."""
        self._gateway.settle(call, reason, message)

    async def _decode(self, call: Call, served: Served, message: Message) -> InferRequest:
        if self._reader is None or self._reader[0] is not served:
            images = served.images.contract if served.images else None
            self._reader = served, RequestReader(served.model.contract.whole, images, self._encoder)
            self._decoder.limit = self._target.largest(served)
        quick = is_quick(served.model.contract, len(message.body), "", message.header_length)
        request = await self._runs.in_turn(quick, self._reader[1].read, message)
        call.priority = request.priority or call.priority
        if request.timeout_s is not None:
            self._gateway.set_timeout(call, request.timeout_s)
        rate = self._gateway.overload.step.frame_rate
        if request.is_image and not self._images.takes(rate):
            raise RefusedError(Reason.SHED, f"under pressure {rate:.0%} of a stream's images are taken")
        return request


class Evenly:
    """Takes a part of what comes, spread evenly. Pure."""

    def __init__(self) -> None:
        self._due = 0.0

    def takes(self, rate: float) -> bool:
        """Whether the next one is taken, where `rate` (0..1) of them are."""
        self._due = min(self._due + rate, 1.0)
        if self._due < 1.0:
            return False
        self._due = 0.0
        return True


def timing_of(call: Call) -> Timing:
    """Where the call's time went until now; without a pass all of it was waiting."""
    total_s = time.monotonic() - call.arrived
    queue_s = max(call.began - call.arrived, 0.0) if call.began else total_s
    return Timing(round(queue_s * 1e6), round(call.compute_s * 1e6), round(total_s * 1e6))
