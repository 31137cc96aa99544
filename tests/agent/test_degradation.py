"""Degradation: fast up, slowly down, in order, and always back to normal."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.degradation import LEVELS, STEPS, Degradation, Misses, Pressure

RISE_S, HOLD_S = 1.0, 30.0
# Seconds until the next look, and the pressure then.
TICKS = st.lists(st.tuples(st.sampled_from((0.25, 0.5, 1.0, 7.0, 31.0)), st.integers(0, 3)), max_size=150)


def run(ticks: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(time, level) after every tick."""
    policy, now, seen = Degradation(RISE_S, HOLD_S), 0.0, []
    for after_s, governor in ticks:
        now += after_s
        before = policy.level
        assert policy.update(Pressure(governor), now) == (policy.level != before)
        seen.append((now, policy.level))
    return seen


def changes(ticks: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(time, by how much) of every change."""
    levels = [(0.0, 0), *run(ticks)]
    return [(b[0], b[1] - a[1]) for a, b in pairwise(levels) if a[1] != b[1]]


@pytest.mark.parametrize(
    ("pressure", "demand", "cause"),
    [
        (Pressure(), 0, ""),
        (Pressure(governor=2), 2, "governor"),
        (Pressure(governor=9), 3, "governor"),
        (Pressure(governor=-1), 0, ""),
        (Pressure(queue=0.49), 0, ""),
        (Pressure(queue=0.5), 1, "queue"),
        (Pressure(queue=1.0, misses=0.1), 3, "queue"),
        (Pressure(governor=1, misses=0.2), 2, "misses"),
    ],
)
def test_the_hardest_pressure_decides(pressure: Pressure, demand: int, cause: str) -> None:
    assert (pressure.demand, pressure.cause) == (demand, cause)


def test_a_burst_changes_nothing() -> None:
    assert changes([(0.5, 3), (0.5, 3), (0.5, 0), (0.5, 3), (0.5, 3), (0.5, 0)]) == []


def test_lasting_pressure_is_answered_after_rise_s() -> None:
    assert changes([(0.5, 3)] * 4) == [(1.5, 3)]


def test_what_lasts_is_the_least_of_the_window() -> None:
    assert changes([(0.5, 3), (0.5, 1), (0.5, 3), (0.5, 3), (0.5, 3)]) == [(1.5, 1), (2.5, 2)]


def test_it_comes_down_one_by_one() -> None:
    ticks = [(0.5, 3)] * 4 + [(0.5, 0)] * 240
    assert changes(ticks) == [(1.5, 3), (32.0, -1), (62.0, -1), (92.0, -1)]


@given(TICKS)
def test_it_never_flaps(ticks: list[tuple[float, int]]) -> None:
    seen = changes(ticks)
    assert all(by >= -1 for _, by in seen)
    for (before, _), (after, by) in pairwise(seen):
        # Down only when the last level has held; up at any time, so two changes of direction take HOLD_S at least.
        assert by > 0 or after - before >= HOLD_S


@given(TICKS)
def test_no_level_without_lasting_demand_for_it(ticks: list[tuple[float, int]]) -> None:
    now = 0.0
    times = [now := now + after_s for after_s, _ in ticks]
    for (at, by), level in zip(changes(ticks), (level for _, level in changes_to(ticks)), strict=True):
        if by > 0:
            window = [demand for time, (_, demand) in zip(times, ticks, strict=True) if at - RISE_S <= time <= at]
            assert min(window) >= level


def changes_to(ticks: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(time, the new level) of every change."""
    levels = [(0.0, 0), *run(ticks)]
    return [b for a, b in pairwise(levels) if a[1] != b[1]]


@given(st.lists(st.tuples(st.sampled_from((0.25, 0.5, 1.0, 7.0, 31.0)), st.integers(0, 3), st.integers(0, 3))))
def test_harder_pressure_never_gives_a_lower_level(ticks: list[tuple[float, int, int]]) -> None:
    soft = run([(after_s, min(a, b)) for after_s, a, b in ticks])
    hard = run([(after_s, max(a, b)) for after_s, a, b in ticks])
    assert all(low <= high for (_, low), (_, high) in zip(soft, hard, strict=True))


@given(TICKS)
def test_calm_brings_it_back_to_normal(ticks: list[tuple[float, int]]) -> None:
    calm_s = RISE_S + LEVELS[-1] * HOLD_S
    assert run([*ticks, *[(1.0, 0)] * round(calm_s + LEVELS[-1])])[-1][1] == 0


def test_every_step_reduces_no_less_than_the_one_before() -> None:
    assert len(STEPS) == len(LEVELS)
    for one, harder in pairwise(STEPS):
        assert one.frame_rate >= harder.frame_rate
        assert one.lighter <= harder.lighter
        assert (one.shed_from or 256) >= (harder.shed_from or 256) > 128


def test_misses_are_a_part_of_what_ended_lately() -> None:
    misses = Misses(memory_s=10)
    for number in range(100):
        misses.count(number % 4 == 0, now=1000.0)
    assert misses.rate(1000.0) == pytest.approx(0.25)
    # Nobody asks any more: that there were a hundred is forgotten too.
    assert misses.rate(1010.0) == pytest.approx(0.25)
    assert misses.rate(1060.0) < 0.01


def test_a_few_misses_are_not_a_rate() -> None:
    misses = Misses()
    misses.count(missed=True, now=5.0)
    assert misses.rate(5.0) == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=50))
def test_the_rate_is_between_0_and_1(ended: list[tuple[float, bool]]) -> None:
    misses, now = Misses(), 0.0
    for after_s, missed in ended:
        now += after_s
        misses.count(missed, now)
        assert 0 <= misses.rate(now) <= 1
