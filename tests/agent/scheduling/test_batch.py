"""What runs together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.request import Request
from agent.scheduling.batch import GAIN, HURRY, SLICE, Limits, Situation, choose, grouped, work
from agent.scheduling.costs import Costs

K = ((3, 4),)


def request(number: int, deadline: float = 100.0, rows: int = 1, key: object = K, priority: int = 0) -> Request:
    return Request(number, deadline, number, (), (), (), "m", "a", priority, rows, key)


def costs_of(curve: Callable[[int], float], *sizes: int) -> Costs:
    """As they are once every size has run a while."""
    costs = Costs([(size, curve(size)) for size in sizes])
    for _ in range(3):
        for size in sizes:
            costs.observe(K, size, curve(size))
    return costs


def flat(rows: int) -> float:
    return {1: 0.0088, 2: 0.0173, 8: 0.0696}.get(rows, 0.0087 * rows)


def steep(rows: int) -> float:
    return 0.002 + 0.002 * (rows - 1) / 15


FLAT = costs_of(flat, 1, 2, 8)
STEEP = costs_of(steep, 1, 2, 4, 8, 16)
LIMITS = Limits(64, 64, rows=16)


def rows_of(requests: list[Request]) -> int:
    return sum(each.rows for each in requests)


def test_on_a_flat_curve_single_requests_run() -> None:
    equals = [request(number) for number in range(20)]
    assert choose(equals, [], Situation(FLAT, LIMITS, 0)) == equals[:1]
    assert work(10, K, FLAT, LIMITS) == pytest.approx(0.088)


def test_on_a_steep_curve_all_run_together_in_their_order() -> None:
    equals = [request(number) for number in range(20)]
    assert choose(equals, [], Situation(STEEP, LIMITS, 0)) == equals[:16]
    assert work(34, K, STEEP, LIMITS) == pytest.approx(2 * steep(16) + steep(2))


def test_a_gain_of_noise_is_none() -> None:
    """Two rows that do 4 % more a second run apart, those that do 6 % more together."""
    for gain, together in ((GAIN - 0.01, 1), (GAIN + 0.01, 2)):
        costs = costs_of({1: 0.01, 2: 0.02 / gain}.__getitem__, 1, 2)
        assert len(choose([request(1), request(2)], [], Situation(costs, LIMITS, 0))) == together


def test_what_nobody_measured_is_measured_first() -> None:
    """A start-up profile said that one row takes much: it is not believed before it was seen."""
    costs = Costs([(1, 0.0118), (2, 0.0173)])
    equals = [request(number) for number in range(8)]
    for _ in range(3):
        assert len(choose(equals, [], Situation(costs, LIMITS, 0))) == 1
        costs.observe(K, 1, 0.0088)
    tried = []
    while (size := len(choose(equals, [], Situation(costs, LIMITS, 0)))) > 1:
        tried.append(size)
        costs.observe(K, size, 0.0087 * size)
    assert len(tried) <= 3


def test_a_batch_is_at_most_twice_as_large_as_any_measured() -> None:
    costs = costs_of(steep, 1, 2)
    assert len(choose([request(number) for number in range(16)], [], Situation(costs, LIMITS, 0))) == 4


def test_only_equal_keys_run_together() -> None:
    others = [request(number, key=((5, number % 3),)) for number in range(1, 9)]
    chosen = choose([request(0), *others, request(9)], [request(10)], Situation(STEEP, LIMITS, 0))
    assert [each.id for each in chosen] == [0, 9, 10]


def test_nobody_is_made_late_by_the_company() -> None:
    tight = request(0, deadline=steep(3))
    chosen = choose([tight, *(request(number) for number in range(1, 16))], [], Situation(STEEP, LIMITS, 0))
    assert len(chosen) == 3
    relaxed = choose([request(1), tight, request(2)], [], Situation(STEEP, LIMITS, 0.0015))
    assert tight not in relaxed


def test_the_most_urgent_of_the_others_is_not_made_late() -> None:
    equals = [request(number) for number in range(16)]
    chosen = choose(equals, [], Situation(STEEP, LIMITS, 0, until=steep(5)))
    assert len(chosen) == 5


def test_a_batch_is_short_and_shorter_where_somebody_more_important_may_come() -> None:
    def middle(rows: int) -> float:
        return 0.1 * rows**0.5

    costs = costs_of(middle, 1, 2, 4, 8, 16, 32)
    equals = [request(number, priority=9) for number in range(64)]
    limits = Limits(64, 64, rows=64)
    assert SLICE * 0.09 < middle(len(choose(equals, [], Situation(costs, limits, 0)))) <= SLICE * 0.1
    hurried = choose(equals, [], Situation(costs, limits, 0, urgent=8))
    assert middle(len(hurried)) <= HURRY * 0.1
    assert len(choose(equals, [], Situation(costs, limits, 0, urgent=9))) > len(hurried)
    assert len(choose(equals, [], Situation(costs, Limits(64, 64, 64, slice_s=0.2), 0))) == 4


def test_where_not_all_can_be_in_time_who_is_in_too_much_of_a_hurry_is_left_out() -> None:
    """One that must run alone would cost a batch of sixteen: with more to do than can be done that is too much."""
    tight = [request(number, deadline=0.0021) for number in range(3)]
    rest = [request(number, deadline=0.0045) for number in range(10, 26)]
    assert choose([*tight, *rest], [], Situation(STEEP, LIMITS, 0)) == rest
    # With time for all, nobody is left out.
    later = [request(number, deadline=0.0065) for number in range(10, 26)]
    assert choose([tight[0], *later], [], Situation(STEEP, LIMITS, 0))[0] == tight[0]
    # And never for what is less important.
    assert choose(tight[:1], rest, Situation(STEEP, LIMITS, 0)) == tight[:1]


def test_a_shared_pass_takes_all_that_it_can_hold() -> None:
    limits = Limits(8, 8, rows=2, batches=3)
    requests = [request(number, key="ab"[number // 4]) for number in range(8)]
    chosen = choose(requests, [], Situation(costs_of(flat, 1, 2), limits, 0))
    assert [each.id for each in chosen] == [0, 1, 2, 3, 4, 5]
    groups = grouped(chosen, limits)
    assert groups is not None
    assert [[each.id for each in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("wrong", [{"queue": 0}, {"per_client": 0}, {"rows": 0}, {"batches": 0}, {"weight": 0.0}])
def test_limits_are_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Limits(**{"queue": 1, "per_client": 1, **wrong})  # type: ignore[arg-type]


requests = st.builds(
    request, st.integers(0, 10**6), st.floats(0.001, 0.05), st.integers(1, 4), st.sampled_from(["a", "b"]),
    st.integers(1, 3),
)  # fmt: skip


@given(
    st.lists(requests, min_size=1, max_size=40, unique_by=lambda each: each.id),
    st.integers(4, 20), st.sampled_from([1, 1, 3]), st.sampled_from([FLAT, STEEP]), st.integers(0, 40),
)  # fmt: skip
def test_no_batch_exceeds_what_memory_was_planned_for(
    waiting: list[Request], rows: int, batches: int, costs: Costs, important: int
) -> None:
    important = 1 + important % len(waiting)
    limits = Limits(64, 64, rows, batches)
    chosen = choose(waiting[:important], waiting[important:], Situation(costs, limits, 0))
    assert chosen
    assert len({each.id for each in chosen}) == len(chosen)
    assert {each.id for each in chosen} <= {each.id for each in waiting}
    groups = grouped(chosen, limits)
    assert groups is not None
    assert len(groups) <= batches
    for group in groups:
        assert len({each.key for each in group}) == 1
        assert rows_of(group) <= rows
    assert sorted(each.id for group in groups for each in group) == sorted(each.id for each in chosen)
