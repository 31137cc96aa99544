"""The vocabulary between transports, scheduler and engine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from agent.errors import Reason

# One of each is made for every request: structs are made in a fraction of what dataclasses take. None can be part of a
# circle (gc=False).


class Request(msgspec.Struct, frozen=True, gc=False):
    """Inputs that stand in a leased slot, ready to run.

    `shapes` and `nbytes` follow the contract's order of inputs; `outputs` are indices into its outputs. Times are of
    the monotonic clock, in seconds. `priority` is from 1, the highest, to 255; 0 is the default. `client` is whom
    queues are shared fairly between. `rows` is the length of the batch's axis. Requests of one model with equal `key`
    may run as one batch: their shapes apart from axis 0, or the bucket that these are padded to. `turn`: the places of
    every pair of state have swapped roles.
    """

    id: int
    deadline: float
    slot: int
    shapes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    outputs: tuple[int, ...]
    model: str = ""
    client: str = ""
    priority: int = 0
    rows: int = 1
    key: Hashable = ()
    arrived: float = 0.0
    turn: bool = False


class Output(msgspec.Struct, frozen=True, gc=False):
    """One result, in the output region of the request's slot: index into the contract's outputs, shape, bytes."""

    index: int
    shape: tuple[int, ...]
    nbytes: int


class Result(msgspec.Struct, frozen=True, gc=False):
    """What the engine gave; the bytes are valid until the slot is released."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A decision not to run a request, and why."""

    reason: Reason
    message: str


class Part(msgspec.Struct, frozen=True):
    """What a request says of its sequence: which it is of, and whether it is the first, or the last."""

    id: int | str
    start: bool
    end: bool
