"""What a batch takes, learnt from what was seen."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.scheduling.costs import ENOUGH, KEYS, SIZES, STALE, WINDOW, Costs

K = ("x", 3)


def test_what_was_measured_at_load_is_the_first_guess() -> None:
    costs = Costs([(4, 0.4), (1, 0.2)])
    assert [costs.likely(K, rows) for rows in (1, 4)] == [0.2, 0.4]
    assert costs.likely(K, 2) == pytest.approx(0.2 + 0.2 / 3)  # between
    assert costs.likely(K, 7) == pytest.approx(0.6)  # as between the last two
    assert Costs([(2, 0.5)]).likely(K, 8) == 2.0  # in proportion, without a second
    assert Costs([(2, 0.5)]).likely(K, 1) == 0.25
    assert Costs().likely(K, 3) == 0


def test_what_is_only_guessed_rules_nothing_out() -> None:
    costs = Costs([(1, 10.0)])
    assert not costs.known(K)
    assert costs.least(K, 1) == 0
    for _ in range(ENOUGH):
        costs.observe(K, 1, 10.0)
    assert costs.known(K)
    assert 8 < costs.least(K, 1) < 10
    assert costs.least(("another", 5), 1) == 0
    assert costs.known(None)


@given(st.floats(0.1, 10))
def test_a_wrong_guess_is_corrected_by_the_first_run_for_all_sizes(wrong: float) -> None:
    costs = Costs([(1, 0.01 * wrong), (8, 0.02 * wrong)])
    costs.observe(K, 1, 0.01)
    assert costs.likely(K, 1) == pytest.approx(0.01)
    assert costs.likely(K, 8) == pytest.approx(0.02)
    assert costs.likely(("another",), 8) == pytest.approx(0.02)


def test_sizes_and_shapes_are_told_apart() -> None:
    costs = Costs([(1, 1.0), (2, 1.5)])
    costs.observe("small", 1, 0.1)
    costs.observe("large", 1, 10.0)
    assert costs.likely("small", 2) == pytest.approx(0.15)
    assert costs.likely("large", 2) == pytest.approx(15.0)


def test_one_slow_run_moves_nothing_and_a_change_is_believed_after_half_a_window() -> None:
    costs = Costs([(1, 1.0)])
    for _ in range(WINDOW):
        costs.observe(K, 1, 1.0)
    costs.observe(K, 1, 50.0)
    assert costs.likely(K, 1) == 1.0
    for _ in range(WINDOW // 2 + 1):
        costs.observe(K, 1, 3.0)
    assert costs.likely(K, 1) == 3.0


def test_the_scatter_brackets_what_comes() -> None:
    random_ = random.Random(1)
    costs = Costs()
    runs = [random_.lognormvariate(0, 0.2) for _ in range(2000)]
    low = high = 0
    for run in runs:
        low += run < costs.least(K, 1)
        high += run > costs.surely(K, 1) > 0
        costs.observe(K, 1, run)
    assert low < 10
    assert 50 < high < 200
    assert costs.likely(K, 1) == pytest.approx(median(runs[-WINDOW:]))


def test_a_run_better_than_any_shows_at_once_in_what_cannot_be_ruled_out() -> None:
    costs = Costs()
    for _ in range(200):
        costs.observe(K, 1, 3.0)
    assert costs.least(K, 1) > 2
    costs.observe(K, 1, 1.0)
    assert costs.least(K, 1) < 1


def test_a_size_is_fresh_after_a_few_runs_and_until_many_others() -> None:
    costs = Costs([(1, 1.0)])
    for _ in range(ENOUGH):
        assert not costs.fresh(K, 1)
        costs.observe(K, 1, 1.0)
    for _ in range(STALE - 1):
        assert costs.fresh(K, 1)
        costs.observe(K, 2, 1.5)
    costs.observe(K, 2, 1.5)
    assert not costs.fresh(K, 1)


def test_memory_is_bounded() -> None:
    costs = Costs([(1, 1.0)])
    for number in range(5000):
        costs.observe(number % (3 * KEYS), 1 + number % (3 * SIZES), 1.0)
    assert len(costs._curves) == KEYS
    assert all(len(curve.sizes) <= SIZES for curve in (*costs._curves.values(), costs._any))
    assert all(len(curve.points) <= SIZES + 1 for curve in (*costs._curves.values(), costs._any))
