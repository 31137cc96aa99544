"""Segments of at most a given weight, chosen from front to back: fast, and the baseline of the best cuts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# A segment ends, if it can, where least crosses the cut, among the positions that leave it at least this full.
WORTHWHILE_FILL = 0.6


@dataclasses.dataclass(frozen=True)
class Position:
    """A node as partitioning sees it: distinct weights by name, and what crosses a cut behind it.

    `crossing` is in bytes, None where no cut may be: a value's size is not known, or it is not part of the source.
    """

    weights: tuple[tuple[str, int], ...]
    crossing: int | None


def cut(positions: Sequence[Position], limit: int) -> list[int]:
    """Ends (exclusive) of segments whose distinct weights fill at most `limit` bytes.

    Greedy over the order; each segment ends where the fewest bytes cross among its well-filled positions, the
    latest of equals. A segment exceeds the limit only where no legal cut lies between its nodes.
    """
    ends: list[int] = []
    start = 0
    # A graph without nodes, which hands on inputs or constants, is one segment too.
    while not ends or start < len(positions):
        start = _next_end(positions, start, limit)
        ends.append(start)
    return ends


def _next_end(positions: Sequence[Position], start: int, limit: int) -> int:
    held: dict[str, int] = {}
    filled = 0
    candidates: list[tuple[int, int, int]] = []
    for at in range(start, len(positions)):
        for name, nbytes in positions[at].weights:
            if name not in held:
                held[name] = nbytes
                filled += nbytes
        if filled > limit and candidates:
            break
        crossing = positions[at].crossing
        if crossing is not None:
            candidates.append((at + 1, filled, crossing))
    else:
        if filled <= limit or not candidates:
            return len(positions)
    enough = [c for c in candidates if c[1] >= WORTHWHILE_FILL * limit] or candidates[-1:]
    return min(enough, key=lambda c: (c[2], -c[0]))[0]
