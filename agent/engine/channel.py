"""What joins gateway and engine: a slab of shared memory for tensors, and a socket for small messages.

Theory of operation: the slab is `slots` equal slots, and a slot has one fixed place for every input and output of
the contract. The gateway writes inputs and says Pass(batches) of runs, each with its slot; the engine writes outputs
and answers every run. Who may touch a slot follows from the lease alone: the gateway before Pass and after the answer,
the engine in between. Messages carry numbers only and are bounded; the socket keeps the boundaries of packets
(SOCK_SEQPACKET), so there is no framing to get wrong. A packet to the gateway holds one message or more, so that the
answers of a pass cost one wake-up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from agent.errors import AgentError
from targets.tensor import Contract, human

# Holds a Run or Done with some hundred tensors; well below the kernel's default socket buffer.
MAX_MESSAGE_BYTES = 64 << 10
# One cache line, and what every vector instruction set is content with.
ALIGN = 64

# Making a view takes longer than finding it; each is some 200 bytes, and most layouts have fewer than this.
_KEPT_VIEWS = 1024

# So much the interpreter copies in a third of what numpy takes to begin. numpy lets other threads go on meanwhile.
_SMALL_BYTES = 16 << 10

Bytes = NDArray[np.uint8]


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Gateway to engine, once: load this bundle. `digest` is that of the manifest the gateway verified.

    `residencies` are `Residency` values, one a segment; `finalised` is the folder of laid-out segments, or empty.
    `quiet`: others compute meanwhile, and are not to be disturbed. `sample_slot` is one that nobody uses, for the
    bundle's sample; without it the engine starts cold.
    """

    folder: str
    digest: str
    threads: int
    log_level: str
    log_format: str
    residencies: tuple[str, ...]
    finalised: str
    quiet: bool = False
    sample_slot: int | None = None


# No message of a pass can be part of a circle (gc=False): the collector need not look through those that are alive.


class Run(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One request of a pass: run what stands in the slot. `outputs` are indices into the contract's outputs.

    With `turn` the two places of every pair of state have swapped roles (`targets.states`).
    """

    id: int
    slot: int
    shapes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    outputs: tuple[int, ...]
    turn: bool = False


class Pass(msgspec.Struct, frozen=True, tag="pass", array_like=True):
    """Gateway to engine: go once through all segments with these batches of runs, each run in a slot of its own.

    Runs of a batch are computed together, rows after rows; their shapes are alike but for axis 0.
    """

    batches: tuple[tuple[Run, ...], ...]


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """Engine to gateway, once: loaded and warm. `warm_s` is what the pass over the bundle's sample took, 0 without.

    `costs`: (rows, seconds) of passes over the sample, by rising rows; none without. `sample_bytes`: of its inputs.
    """

    runtime: str
    load_s: float
    warm_s: float
    pss: dict[str, int]
    costs: tuple[tuple[int, float], ...] = ()
    sample_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Engine to gateway, once, instead of Ready: why it cannot load."""

    message: str
    hint: str


class Passed(msgspec.Struct, frozen=True, gc=False, tag="passed", array_like=True):
    """Engine to gateway, before the answers of a pass: what it took, however many runs went together.

    `streamed_bytes` is what was brought in for the turns of segments since the last pass.
    """

    pass_s: float
    streamed_bytes: int


class Done(msgspec.Struct, frozen=True, gc=False, tag="done", array_like=True):
    """Engine to gateway, the answer to a run: (index, shape, nbytes) of every output now in the slot."""

    id: int
    outputs: tuple[tuple[int, tuple[int, ...], int], ...]


class RunError(msgspec.Struct, frozen=True, gc=False, tag="error", array_like=True):
    """Engine to gateway, the answer to a run that failed; others of its pass go on. `reason` is a `Reason` value."""

    id: int
    reason: str
    message: str


ToEngine = Load | Pass
ToGateway = Ready | Failed | Passed | Done | RunError

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
_to_gateway: msgspec.msgpack.Decoder[list[ToGateway]] = msgspec.msgpack.Decoder(list[ToGateway])


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(gateway's end, engine's end)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_to_engine(end: socket.socket, message: ToEngine) -> None:
    """Send one message; raises AgentError when it is larger than the channel takes."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise AgentError(f"a message of {human(len(data))} to the engine, at most {human(MAX_MESSAGE_BYTES)} pass")
    end.send(data)


def send_to_gateway(end: socket.socket, *messages: ToGateway) -> None:
    """Send messages in as few packets as they need; raises AgentError when one is larger than the channel takes."""
    data = _encoder.encode(messages)
    if len(data) <= MAX_MESSAGE_BYTES:
        end.send(data)
    elif len(messages) > 1:
        half = len(messages) // 2
        send_to_gateway(end, *messages[:half])
        send_to_gateway(end, *messages[half:])
    else:
        raise AgentError(f"a message of {human(len(data))} to the gateway, at most {human(MAX_MESSAGE_BYTES)} pass")


def receive_in_engine(end: socket.socket) -> ToEngine | None:
    """The gateway's next message; None when the gateway is gone."""
    data = end.recv(MAX_MESSAGE_BYTES)
    message: ToEngine | None = _to_engine.decode(data) if data else None
    return message


def receive_in_gateway(end: socket.socket) -> list[ToGateway] | None:
    """The engine's next messages; None when the engine is gone. Raises BlockingIOError when there are none yet."""
    data = end.recv(MAX_MESSAGE_BYTES)
    return _to_gateway.decode(data) if data else None


def most_runs(contract: Contract) -> int:
    """How many runs of the contract one pass can hold, whatever their shapes and batches."""
    number = (1 << 64) - 1
    shapes = tuple((number,) * len(spec.shape) for spec in contract.inputs)
    outputs = (number,) * len(contract.outputs)
    largest = len(_encoder.encode((Run(number, number, shapes, (number,) * len(shapes), outputs),)))
    around = len(_encoder.encode(Pass(()))) + 4
    return max((MAX_MESSAGE_BYTES - around) // largest, 1)


@dataclass(frozen=True)
class Layout:
    """Where every tensor stands within a slot; both processes derive it from the same contract."""

    slots: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    slot_bytes: int

    @classmethod
    def of(cls, contract: Contract, slots: int) -> Layout:
        """Every tensor at its most bytes, one after the other, aligned; no more slots than one pass can name."""
        at = 0

        def place(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
            nonlocal at
            places = []
            for nbytes in sizes:
                places.append((at, nbytes))
                at += -(-nbytes // ALIGN) * ALIGN
            return tuple(places)

        inputs, outputs = map(place, contract.places)
        return cls(min(slots, most_runs(contract)), inputs, outputs, max(at, ALIGN))

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes


class Slab:
    """The shared memory, seen through its layout."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self.layout = layout
        self._bytes: Bytes = np.frombuffer(mmap.mmap(fd, layout.nbytes), np.uint8)
        self._memory = self._bytes.data
        self._inputs: dict[tuple[int, int], Bytes] = {}
        self._outputs: dict[tuple[int, int], Bytes] = {}

    @classmethod
    def create(cls, layout: Layout) -> Slab:
        """Allocate all of it now, so that memory is short here and not in the middle of a request."""
        fd = os.memfd_create("tightfit-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, layout.nbytes)
            # Neither side can cut the slab short under the other's mapping, which would kill it by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise AgentError(f"cannot reserve {human(layout.nbytes)} of shared memory: {error.strerror}") from None
        return cls(fd, layout)

    def close(self) -> None:
        """Let the memory go: it is free when nobody has a view of it any more, here and in the engine."""
        self._inputs.clear()
        self._outputs.clear()
        self._bytes = np.empty(0, np.uint8)
        self._memory = self._bytes.data
        self.close_fd()

    def close_fd(self) -> None:
        """Close the descriptor alone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def input(self, slot: int, index: int) -> Bytes:
        """Room for input `index` in the slot."""
        view = self._inputs.get((slot, index))
        return self._view(self._inputs, slot, index, self.layout.inputs[index]) if view is None else view

    def output(self, slot: int, index: int) -> Bytes:
        """Room for output `index` in the slot."""
        view = self._outputs.get((slot, index))
        return self._view(self._outputs, slot, index, self.layout.outputs[index]) if view is None else view

    def put(self, slot: int, index: int, data: bytes | memoryview) -> None:
        """Copy the bytes of a tensor to where input `index` of the slot begins."""
        start, room = self.layout.inputs[index]
        if not 0 <= slot < self.layout.slots or len(data) > room:
            raise ValueError(f"{len(data)} bytes for input {index} of slot {slot}, which has room for {room}")
        start += slot * self.layout.slot_bytes
        end = start + len(data)
        if len(data) <= _SMALL_BYTES:
            self._memory[start:end] = data
        else:
            self._bytes[start:end] = np.frombuffer(data, np.uint8)

    def seen(self, slot: int, index: int, nbytes: int) -> memoryview:
        """The first so many bytes of output `index` in the slot, as they are read while the slot is leased."""
        start, room = self.layout.outputs[index]
        if not 0 <= slot < self.layout.slots or nbytes > room:
            raise ValueError(f"{nbytes} bytes of output {index} of slot {slot}, which has room for {room}")
        start += slot * self.layout.slot_bytes
        return self._memory[start : start + nbytes]

    def inputs(self, index: int) -> Bytes:
        """Room for input `index` in every slot, a row each."""
        return self._rows(*self.layout.inputs[index])

    def outputs(self, index: int) -> Bytes:
        """Room for output `index` in every slot, a row each."""
        return self._rows(*self.layout.outputs[index])

    def _rows(self, start: int, nbytes: int) -> Bytes:
        slots = self._bytes.reshape(self.layout.slots, self.layout.slot_bytes)
        return slots[:, start : start + nbytes]

    def _view(self, kept: dict[tuple[int, int], Bytes], slot: int, index: int, place: tuple[int, int]) -> Bytes:
        if not 0 <= slot < self.layout.slots:
            raise ValueError(f"slot {slot} is not one of {self.layout.slots}")
        start = slot * self.layout.slot_bytes + place[0]
        view = self._bytes[start : start + place[1]]
        if len(kept) < _KEPT_VIEWS:
            kept[slot, index] = view
        return view
