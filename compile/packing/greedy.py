"""First-fit under several orders, and a local search over orders. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compile.packing.problem import Ints, Problem

ROUNDS, WORK = 32, 200_000_000
"""Of the local search, and pairs of buffers that it looks at: most of what it finds it finds in the first rounds."""


def orders(problem: Problem) -> Iterator[Ints]:
    """By size (Pisarchyk and Lee 2020, and TFLite Micro's planner), by size times life, by life, and by birth."""
    size, life = problem.size, problem.end - problem.begin
    yield np.lexsort((problem.begin, -size))
    yield np.lexsort((problem.begin, -size * life))
    yield np.lexsort((-size, -life))
    yield np.lexsort((-size, problem.begin))


def first_fit(problem: Problem, order: Ints) -> Ints:
    """Put each buffer at the lowest offset that is free during its whole life; returns offsets, int64 [buffers]."""
    begin, end, size = problem.begin[order], problem.end[order], problem.size[order]
    placed = np.zeros(len(order), np.int64)
    for at in range(len(order)):
        live = np.flatnonzero((begin[:at] < end[at]) & (begin[at] < end[:at]))
        live = live[np.argsort(placed[live], kind="stable")]
        ends = np.maximum.accumulate(np.concatenate(([0], placed[live] + size[live])))
        fits = np.flatnonzero(placed[live] - ends[:-1] >= size[at])
        placed[at] = ends[fits[0]] if len(fits) else ends[-1]
    offsets = np.empty_like(placed)
    offsets[order] = placed
    return offsets


def pack_greedily(problem: Problem, goal: int) -> Ints:
    """The lowest of all orders, and of the orders that a local search makes of the best; stops at `goal` units.

    The search is squeaky wheel optimization (Joslin and Clements 1999): what ended above the goal moves forward in the
    order, half the way to its start.
    """
    tried = []
    for order in orders(problem):
        offsets = first_fit(problem, order)
        tried.append((problem.height(offsets), order, offsets))
        if tried[-1][0] <= goal:
            return offsets
    height, order, best = min(tried, key=lambda attempt: attempt[0])
    for _ in range(min(ROUNDS, WORK // len(order) ** 2)):
        if height <= goal:
            break
        rank = np.empty(len(order))
        rank[order] = np.arange(len(order))
        rank[offsets + problem.size > goal] /= 2
        order = np.argsort(rank, kind="stable")
        offsets = first_fit(problem, order)
        if problem.height(offsets) < height:
            height, best = problem.height(offsets), offsets
    return best
