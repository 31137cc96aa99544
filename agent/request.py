"""The vocabulary between transports, scheduler and engine."""

from __future__ import annotations

from dataclasses import dataclass

from agent.errors import Reason


@dataclass(frozen=True, slots=True)
class Request:
    """Inputs that stand in a leased slot, ready to run.

    `shapes` and `nbytes` follow the contract's order of inputs; `outputs` are indices into its outputs.
    Times are of the monotonic clock, in seconds.
    """

    id: int
    deadline: float
    slot: int
    shapes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One result, in the output region of the request's slot: index into the contract's outputs, shape, bytes."""

    index: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the engine gave; the bytes are valid until the slot is released."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A decision not to run a request, and why."""

    reason: Reason
    message: str
