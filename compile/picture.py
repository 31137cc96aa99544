"""A memory plan as something to look at: columns over time, and the arena's buffers. Pure; `page` and `report` draw it.

Time runs from left to right: the phases of a bundle's life and, where segments take turns, the turns of one run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from targets.arena import Arena, Placed
from targets.budget import KINDS, RING, MemoryPlan, Phase, Sweep

# More rectangles than this nobody tells apart, and a phone takes long to draw.
MOST_BUFFERS = 1500


@dataclasses.dataclass(frozen=True)
class Slice:
    """One part of a column: what it is, how the kernel accounts for it, and bytes."""

    name: str
    kind: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Column:
    """Everything that is in memory at one time; slices of one kind stand together, in the order of KINDS."""

    label: str
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.slices)

    def of(self, kind: str) -> int:
        return sum(each.nbytes for each in self.slices if each.kind == kind)


def columns(plan: MemoryPlan, segments: Sequence[str]) -> list[Column]:
    """A column for every phase; where segments are streamed, one for every turn of a run in the place of `run`."""
    found = []
    for phase in plan.phases:
        if phase.name == "run" and plan.sweep is not None:
            found += _turns(phase, plan.sweep, segments)
        else:
            found.append(Column(phase.name, _slices(phase)))
    return found


def _slices(phase: Phase) -> tuple[Slice, ...]:
    parts = [Slice(term.name, term.kind, term.nbytes) for term in phase.terms if term.nbytes]
    return tuple(sorted(parts, key=lambda each: KINDS.index(each.kind)))


def _turns(run: Phase, sweep: Sweep, segments: Sequence[str]) -> list[Column]:
    """The weights of every turn: those that stay, the running segment's, those that are read ahead into the other of
    the two places, and what is left of these."""
    others = tuple(each for each in _slices(run) if each.name not in ("mapped_weights", RING))
    staying = sum(nbytes for step, nbytes in enumerate(sweep.segment_bytes) if step not in sweep.streamed)
    found = []
    for step, name in enumerate(segments):
        number = sum(each < step for each in sweep.streamed)
        runs = step in sweep.streamed
        ahead = (number + runs) % len(sweep.streamed)
        here = sweep.segment_bytes[step] if runs else 0
        meet = runs and number % 2 == ahead % 2
        coming = 0 if meet else sweep.segment_bytes[sweep.streamed[ahead]]
        weights = [
            Slice("weights that stay", "file", staying),
            Slice("weights of this turn", "shared", here),
            Slice("weights read ahead", "shared", coming),
            Slice("room for others", "shared", max(run.nbytes(RING) - here - coming, 0)),
        ]
        found.append(Column(f"run {name}", (*others, *(each for each in weights if each.nbytes))))
    return found


@dataclasses.dataclass(frozen=True)
class Live:
    """Bytes of activations that are live during the steps [start, end) of a run."""

    start: int
    end: int
    nbytes: int


def live(arena: Arena) -> list[Live]:
    """How much of the arena is in use over a run: steps of equal use are joined."""
    change: dict[int, int] = {}
    for buffer in arena.buffers:
        change[buffer.lower] = change.get(buffer.lower, 0) + buffer.nbytes
        change[buffer.upper] = change.get(buffer.upper, 0) - buffer.nbytes
    found: list[Live] = []
    used = 0
    times = sorted(change)
    for start, end in itertools.pairwise(times):
        used += change[start]
        if found and found[-1].nbytes == used:
            found[-1] = Live(found[-1].start, end, used)
        else:
            found.append(Live(start, end, used))
    return found


def largest_buffers(arena: Arena) -> tuple[Placed, ...]:
    """The buffers that are worth drawing: the largest by bytes times steps, in the plan's order."""
    if len(arena.buffers) <= MOST_BUFFERS:
        return arena.buffers
    order = sorted(arena.buffers, key=lambda b: (-b.nbytes * (b.upper - b.lower), b.name))
    kept = {id(each) for each in order[:MOST_BUFFERS]}
    return tuple(each for each in arena.buffers if id(each) in kept)
