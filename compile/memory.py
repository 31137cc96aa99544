"""Where each activation stands, and what every phase of the bundle's life needs. Pure: values in, values out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from compile.backends.base import Step, Trace, WeightFootprint
from targets.arena import Arena, Buffer, Placed, lower_bound
from targets.board import MIB, Board
from targets.budget import MemoryPlan, Phase, Term, budget_bytes
from targets.errors import BudgetError
from targets.tensor import human

ALIGNMENT = 256
"""What onnxruntime's arena rounds every request to (kMinAllocationSize of its BFC arena)."""


@dataclasses.dataclass
class _Live:
    """A buffer while the trace is followed: a value may hand it on to a later one."""

    name: str
    nbytes: int
    lower: int
    upper: int


def activation_buffers(trace: Trace) -> tuple[Buffer, ...]:
    """One buffer per allocation of the observed run, alive from its kernel to the last that reads it.

    A kernel that allocated less than it wrote worked in place, or renamed its input (Reshape): then the output
    lives on in the input's buffer. Graph outputs live to the end of the run.
    """
    last_use = _last_uses(trace.steps)
    end = len(trace.steps)
    buffers: list[_Live] = []
    holder: dict[str, _Live] = {}
    for at, step in enumerate(trace.steps):
        spare = step.allocated
        for name, nbytes in _outputs(step):
            until = end if name in trace.output_nbytes else max(last_use.get(name, at), at) + 1
            if step.in_subgraph:
                until = max(until, _enclosing_end(trace.steps, at))
            source = None if spare >= nbytes else _reused(step, holder, nbytes, at)
            if source is None and (spare < nbytes and _comes_from_outside(step, holder)):
                continue
            if source is None:
                source = _Live(name or f"{step.name}:{at}", _aligned(nbytes), at, until)
                buffers.append(source)
                spare -= nbytes
            source.upper = max(source.upper, until)
            if name:
                holder[name] = source
    return tuple(Buffer(b.name, b.lower, b.upper, b.nbytes) for b in buffers if b.nbytes)


def _outputs(step: Step) -> Iterable[tuple[str, int]]:
    names = (*step.outputs, *[""] * (len(step.output_nbytes) - len(step.outputs)))
    return zip(names, step.output_nbytes, strict=False)


def _last_uses(steps: Sequence[Step]) -> dict[str, int]:
    return {name: at for at, step in enumerate(steps) for name in step.inputs}


def _enclosing_end(steps: Sequence[Step], at: int) -> int:
    """Kernels of a body end before the control-flow node around them does."""
    return next((later for later in range(at, len(steps)) if not steps[later].in_subgraph), len(steps) - 1) + 1


def _reused(step: Step, holder: dict[str, _Live], nbytes: int, at: int) -> _Live | None:
    """The input whose buffer the output took: large enough, and best one that nobody reads later."""
    held = [holder[name] for name in step.inputs if name in holder and holder[name].nbytes >= nbytes]
    return min(held, key=lambda b: (b.upper > at + 1, b.nbytes), default=None)


def _comes_from_outside(step: Step, holder: dict[str, _Live]) -> bool:
    """Whether the output can only be a view of a graph input or a weight, which the arena does not hold."""
    return not any(name in holder for name in step.inputs)


def place(buffers: Sequence[Buffer]) -> Arena:
    """Offsets by greedy first-fit under several orders; the lowest result, with its bound, is kept."""
    orders: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
        lambda b: (-b.nbytes, b.lower),
        lambda b: (-b.nbytes * (b.upper - b.lower), b.lower),
        lambda b: (b.lower - b.upper, -b.nbytes),
        lambda b: (b.lower, -b.nbytes),
    )
    bound = lower_bound(tuple(buffers))
    best: list[Placed] = []
    best_height = -1
    for order in orders:
        placed = _first_fit(sorted(buffers, key=order))
        height = max((p.offset + p.nbytes for p in placed), default=0)
        if best_height < 0 or height < best_height:
            best, best_height = placed, height
        if best_height == bound:
            break
    return Arena(best_height, bound, ALIGNMENT, tuple(sorted(best, key=lambda p: (p.lower, p.offset, p.name))))


def _first_fit(buffers: Sequence[Buffer]) -> list[Placed]:
    """Put each buffer at the lowest offset that is free during its whole life (TFLite-Micro's planner)."""
    placed: list[Placed] = []
    for buffer in buffers:
        offset = 0
        neighbours = (p for p in placed if p.lower < buffer.upper and buffer.lower < p.upper)
        for other in sorted(neighbours, key=lambda p: p.offset):
            if offset + buffer.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        placed.append(Placed(buffer.name, buffer.lower, buffer.upper, buffer.nbytes, offset))
    return placed


# Below this, a closer search for the arena costs more runs than it saves memory.
SEARCH_STEP_BYTES = 1 << 16


def arena_in_practice(planned: int, fits: Callable[[int], bool], limit: int) -> int:
    """An arena in which the runtime's own online allocator completes a run, at most 5 % (or 64 KiB) above the
    smallest; the difference to the plan is the runtime's scratch and fragmentation.

    Starts at the plan's height, doubles what it adds until a run fits, then halves the gap. Raises BudgetError
    when no run fits within `limit` bytes.
    """
    low = high = _aligned(max(planned, ALIGNMENT))
    if fits(high):
        return high
    extra = max(high // 20, SEARCH_STEP_BYTES)
    while True:
        low, high = high, _aligned(min(high + extra, limit))
        if high <= low:
            raise BudgetError(
                f"no arena of up to {human(limit)} lets the model run; its activations alone need {human(planned)}",
                "use smaller shapes, or choose a larger board",
            )
        if fits(high):
            break
        extra *= 2
    while high - low > max(low // 20, SEARCH_STEP_BYTES):
        middle = _aligned((low + high) // 2)
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one bundle needs beside its arena: weights, the runtime's scratch, bytes of one request slot."""

    weights: WeightFootprint
    workspace: int
    slot: int


def plan(board: Board, arena: Arena, footprint: Footprint, slots: int) -> MemoryPlan:
    """The certificate for a bundle of one resident segment.

    load: the weights as mapped from the file, and at the same time what the runtime copies of them.
    run:  what stays of that, the arena, and each slot twice: once in the slab that both processes share, once
          as the body or answer that the gateway reads or sends.
    """
    weights = footprint.weights
    fixed = Term("runtime", "anonymous", board.memory.runtime_fixed_mib * MIB)
    session = Term("session", "anonymous", weights.session)
    heap = Term("weights", "anonymous", weights.heap)
    mapped = Term("mapped_weights", "file", weights.mapped)
    return MemoryPlan(
        budget_bytes=budget_bytes(board),
        slots=slots,
        phases=(
            Phase("load", (fixed, session, heap, Term("mapped_weights", "file", weights.mapped + weights.heap))),
            Phase(
                "run",
                (
                    fixed,
                    session,
                    heap,
                    mapped,
                    Term("activations", "anonymous", arena.height),
                    Term("workspace", "anonymous", footprint.workspace),
                    Term("io_slots", "shared", slots * footprint.slot),
                    Term("bodies", "anonymous", slots * footprint.slot),
                ),
            ),
        ),
        arena=arena,
    )
