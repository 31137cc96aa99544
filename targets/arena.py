"""Buffers with lifetimes in one arena, and a checker that trusts no planner.

The problem and its answer are values: `Buffer` is the question (MiniMalloc's format: half-open lifetime, size),
`Placed` the answer. `check_arena` compares every pair that is live together, so that it shares no idea with what made
the plan.
"""

from __future__ import annotations

import itertools

import msgspec

from targets.errors import BudgetError
from targets.tensor import human


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that must stand at one place during the steps [lower, upper)."""

    name: str
    lower: int
    upper: int
    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.lower < self.upper:
            raise ValueError(f"buffer {self.name!r}: needs 0 <= lower < upper, not [{self.lower}, {self.upper})")
        if self.nbytes < 0:
            raise ValueError(f"buffer {self.name!r}: bytes cannot be negative")


class Placed(Buffer, frozen=True, forbid_unknown_fields=True):
    """A buffer and its offset from the start of the arena, in bytes."""

    offset: int = 0


class Arena(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan: height of the arena, the most that is live at one step (no plan can be lower), and every place."""

    height: int
    lower_bound: int
    alignment: int
    buffers: tuple[Placed, ...]


def lower_bound(buffers: tuple[Buffer, ...]) -> int:
    """The most bytes live at one step: the height no arena can go below."""
    change: dict[int, int] = {}
    for buffer in buffers:
        change[buffer.lower] = change.get(buffer.lower, 0) + buffer.nbytes
        change[buffer.upper] = change.get(buffer.upper, 0) - buffer.nbytes
    live = most = 0
    for step in sorted(change):
        live += change[step]
        most = max(most, live)
    return most


def check_arena(arena: Arena) -> None:
    """Compare every pair of buffers that are live together; raises BudgetError naming the first that break the plan."""
    if arena.alignment < 1:
        raise BudgetError(f"the arena's alignment is {arena.alignment}", "it must be at least 1")
    if arena.height < 0:
        raise BudgetError(f"the arena's height is {arena.height}", "it cannot be negative")
    by_birth = sorted(arena.buffers, key=lambda buffer: buffer.lower)
    for index, a in enumerate(by_birth):
        if a.offset < 0 or a.offset % arena.alignment:
            raise BudgetError(f"buffer {a.name!r} stands at {a.offset}, not a multiple of {arena.alignment}")
        if a.offset + a.nbytes > arena.height:
            raise BudgetError(f"buffer {a.name!r} reaches past the arena's {human(arena.height)}")
        for b in itertools.islice(by_birth, index + 1, None):
            if a.upper <= b.lower:
                break  # and so are all that are born later
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            if not apart and a.nbytes and b.nbytes:
                raise BudgetError(f"buffers {a.name!r} and {b.name!r} are live together and overlap")
    if arena.lower_bound != lower_bound(arena.buffers):
        raise BudgetError("the arena's stated lower bound is not that of its buffers")
