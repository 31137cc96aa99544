"""Packing problems for tests, and their best heights by a search that shares nothing with the compiler's."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from compile.packing.problem import Ints, Problem, sections_of

INSTANCES = Path(__file__).parents[1] / "data" / "minimalloc"
CAPACITY = 1 << 20

Span = tuple[int, int, int]
"""A buffer: live in [lower, upper), and its size."""

NO_PERFECT_PACKING: tuple[Span, ...] = (
    *((4, 5, 2), (0, 1, 2), (1, 3, 1), (0, 2, 2), (1, 4, 1), (3, 5, 2), (2, 4, 1), (2, 3, 1)),
)
"""Four units are live at every step, but there is no arena of less than five."""


def instance(name: str) -> list[Span]:
    """One of google/minimalloc's challenging problems, A to K."""
    with (INSTANCES / f"{name}.{CAPACITY}.csv").open() as file:
        return [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def problem_of(spans: list[Span] | tuple[Span, ...]) -> Problem:
    """The same in sections and units."""
    begin, end = sections_of([(lower, upper) for lower, upper, _ in spans])
    return Problem(begin, end, np.array([size for *_, size in spans], np.int64))


@st.composite
def spans(draw: st.DrawFn, most: int = 9) -> list[Span]:
    """Few buffers. In most cases all steps have the same load, as nothing else makes packing hard."""
    steps, largest = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    loads, made = [0] * steps, []
    for _ in range(draw(st.integers(0, most))):
        room = [step for step in range(steps) if loads[step] < 2 * largest]
        if not room:
            break
        lower = draw(st.sampled_from(room))
        upper = lower + 1
        while upper < steps and loads[upper] < 2 * largest and draw(st.booleans()):
            upper += 1
        size = draw(st.integers(1, min(largest, *(2 * largest - load for load in loads[lower:upper]))))
        made.append((lower, upper, size))
        for step in range(lower, upper):
            loads[step] += size
    return made


def overlaps(spans: list[Span] | tuple[Span, ...], offsets: Ints) -> list[tuple[int, int]]:
    """Pairs of buffers that share a unit."""
    return [
        (i, j)
        for j, (lower, upper, size) in enumerate(spans)
        for i, (other_lower, other_upper, other_size) in enumerate(spans[:j])
        if lower < other_upper and other_lower < upper
        if offsets[j] < offsets[i] + other_size and offsets[i] < offsets[j] + size
    ]


def least_height(spans: list[Span] | tuple[Span, ...]) -> int:
    """Of all stackings of the buffers in all orders: in the order of its offsets, that of any best arena is one."""
    steps = max((upper for _, upper, _ in spans), default=0)
    lowest = sum(size for *_, size in spans)
    seen: set[tuple[frozenset[int], tuple[int, ...]]] = set()
    todo = [(frozenset(range(len(spans))), (0,) * steps)]
    while todo:
        left, tops = todo.pop()
        if (left, tops) in seen or max(tops, default=0) >= lowest > 0:
            continue
        seen.add((left, tops))
        if not left:
            lowest = max(tops, default=0)
        for buffer in left:
            lower, upper, size = spans[buffer]
            top = max(tops[lower:upper]) + size
            todo.append((left - {buffer}, tops[:lower] + (top,) * (upper - lower) + tops[upper:]))
    return lowest
