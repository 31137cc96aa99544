"""First-fit against a plain one, and what the local search is for."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given

from compile.packing.greedy import first_fit, orders, pack_greedily
from tests.support.packing import Span, overlaps, problem_of, spans


@given(spans(most=20))
def test_first_fit_takes_the_lowest_offset_that_is_free(spans: list[Span]) -> None:
    problem = problem_of(spans)
    for order in orders(problem):
        offsets = first_fit(problem, order)
        placed: list[int] = []
        for buffer in order.tolist():
            lower, upper, size = spans[buffer]
            others = [i for i in placed if spans[i][0] < upper and lower < spans[i][1]]
            free = (
                offset
                for offset in sorted({0, *(offsets[i] + spans[i][2] for i in others)})
                if all(offset + size <= offsets[i] or offsets[i] + spans[i][2] <= offset for i in others)
            )
            assert offsets[buffer] == next(free)
            placed.append(buffer)


@given(spans(most=20))
def test_nothing_overlaps_and_no_order_alone_is_lower(spans: list[Span]) -> None:
    problem = problem_of(spans)
    offsets = pack_greedily(problem, goal=0)
    assert not overlaps(spans, offsets)
    heights = [problem.height(first_fit(problem, order)) for order in orders(problem)]
    assert problem.load().max(initial=0) <= problem.height(offsets) <= min(heights)


def layers(seed: int, count: int) -> list[Span]:
    """A chain of layers, one in ten of which is read again much later."""
    rng = random.Random(seed)
    made = []
    for step in range(count):
        skip = rng.randrange(count // 2) if rng.random() < 0.1 else 0
        size = rng.choice([1, 2, 3, 4, 8, 12, 16, 24, 32, 48]) * rng.choice([1, 1, 4])
        made.append((step, step + 2 + skip + int(rng.expovariate(1 / 1.2)), size))
    return made


def test_the_local_search_packs_most_models_perfectly_that_no_order_does() -> None:
    problems = [problem_of(layers(seed, 150)) for seed in range(40)]
    alone = [min(problem.height(first_fit(problem, order)) for order in orders(problem)) for problem in problems]
    loads = [int(problem.load().max()) for problem in problems]
    gaps = [(problem, load) for problem, height, load in zip(problems, alone, loads, strict=True) if height > load]
    packed = sum(problem.height(pack_greedily(problem, load)) == load for problem, load in gaps)
    assert len(gaps) >= 5
    assert packed > len(gaps) / 2


def test_it_ends_at_the_goal() -> None:
    problem = problem_of(layers(1, 150))
    first = first_fit(problem, next(orders(problem)))
    assert np.array_equal(pack_greedily(problem, problem.height(first)), first)
