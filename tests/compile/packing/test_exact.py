"""The complete search: what it finds holds, and what it says there is not, is not."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.packing.exact import FOUND, NONE, UNKNOWN, search
from tests.support.packing import NO_PERFECT_PACKING, Span, instance, least_height, overlaps, problem_of, spans

NODES = 50_000
RULES = range(4)


def check(spans: list[Span] | tuple[Span, ...], seed: int) -> None:
    """Every rule, in a random order of the buffers and sections, at the best height and below it."""
    rng = random.Random(seed)
    best, problem = least_height(spans), problem_of(spans)
    order = np.array(rng.sample(range(len(spans)), len(spans)), np.int64)
    favour = np.array([rng.randrange(3) for _ in range(problem.sections)], np.int64)
    part = problem.part(order)
    for rule in RULES:
        outcome, offsets, nodes = search(part, best, rule, favour, NODES)
        assert outcome == FOUND
        assert part.height(offsets) == best
        assert not overlaps([spans[i] for i in order], offsets)
        assert nodes <= NODES
        if spans:
            assert search(part, best - 1, rule, favour, NODES)[0] == NONE


@given(spans(), st.integers(0, 1 << 30))
def test_it_finds_the_best_height_and_proves_that_it_is(spans: list[Span], seed: int) -> None:
    check(spans, seed)


@pytest.mark.parametrize("seed", range(20))
def test_it_proves_that_the_load_cannot_be_reached(seed: int) -> None:
    assert problem_of(NO_PERFECT_PACKING).load().tolist() == [4] * 5
    assert least_height(NO_PERFECT_PACKING) == 5
    check(NO_PERFECT_PACKING, seed)


FITS_IN_15: tuple[Span, ...] = (
    *((10, 22, 3), (2, 11, 3), (16, 18, 6), (7, 10, 2), (5, 10, 1), (1, 12, 5), (1, 5, 4), (13, 15, 5), (15, 16, 2)),
    *((20, 22, 5), (8, 15, 3), (16, 22, 2), (9, 13, 1), (16, 17, 1), (12, 16, 4), (7, 9, 1), (1, 8, 3), (15, 20, 3)),
    *((6, 7, 3), (19, 22, 5), (19, 20, 2), (1, 2, 3), (12, 13, 4), (0, 1, 2), (5, 6, 3), (11, 12, 2), (0, 1, 3)),
    *((18, 19, 2), (18, 19, 3), (17, 19, 1), (18, 19, 1), (15, 16, 3), (0, 1, 3), (0, 1, 5), (11, 12, 1), (0, 1, 2)),
)


@pytest.mark.parametrize("rule", RULES)
def test_what_fails_for_reasons_elsewhere_is_not_taken_for_failed_later(rule: int) -> None:
    """Its failures in one part of the time have reasons in another, so a state alone does not say that it fails."""
    problem, rng = problem_of(FITS_IN_15), random.Random(rule)
    outcomes = []
    for _ in range(100):
        order = np.array(rng.sample(range(len(FITS_IN_15)), len(FITS_IN_15)), np.int64)
        favour = np.array([rng.randrange(5) for _ in range(problem.sections)], np.int64)
        outcomes.append(search(problem.part(order), 15, rule, favour, 3000)[0])
    assert NONE not in outcomes
    assert FOUND in outcomes


def test_it_ends_after_as_many_nodes_as_it_is_given() -> None:
    problem = problem_of([(lower, upper, size // 1024) for lower, upper, size in instance("G")])
    favour = np.zeros(problem.sections, np.int64)
    outcome, _, nodes = search(problem, 1024, 0, favour, 500)
    assert (outcome, nodes) == (UNKNOWN, 500)


def test_equal_searches_are_equal() -> None:
    spans = instance("A")
    problem = problem_of([(lower, upper, size // 1024) for lower, upper, size in spans])
    favour = np.arange(problem.sections, dtype=np.int64)
    first, second = (search(problem, 1100, 1, favour, 5000) for _ in range(2))
    assert (first[0], first[2]) == (second[0], second[2])
    assert np.array_equal(first[1], second[1])
