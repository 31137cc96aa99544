"""A client may ask so often and no oftener, and what is remembered of clients is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.limits.rates import Rates


def test_a_burst_and_then_the_rate() -> None:
    rates = Rates(2.0, 3, 0)
    assert [rates.wait_s("a", 0.0) for _ in range(5)] == [0, 0, 0, 1, 1]
    assert rates.wait_s("b", 0.0) == 0
    assert [rates.wait_s("a", 0.5) for _ in range(2)] == [0, 1]
    assert [rates.wait_s("a", 100.0) for _ in range(4)] == [0, 0, 0, 1]


def test_when_to_try_again_is_when_it_succeeds() -> None:
    rates = Rates(0.1, 1, 0)
    assert rates.wait_s("a", 0.0) == 0
    assert rates.wait_s("a", 0.5) == 10
    assert rates.wait_s("a", 9.9) == 1
    assert rates.wait_s("a", 10.0) == 0


def test_without_a_rate_nothing_is_remembered() -> None:
    rates = Rates(0, 1, 0)
    assert [rates.wait_s("a", 0.0) for _ in range(100)] == [0] * 100
    assert len(rates) == 0


def test_so_many_at_once() -> None:
    rates = Rates(0, 1, 2)
    assert [rates.begin("a") for _ in range(3)] == [True, True, False]
    assert rates.begin("b")
    rates.end("a")
    assert rates.begin("a")
    with pytest.raises(KeyError):
        rates.end("c")


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2)), max_size=200), st.integers(1, 8))
def test_what_is_remembered_is_bounded(asks: list[tuple[int, float]], most: int) -> None:
    rates, now = Rates(1.0, 2, 0, most), 0.0
    for client, later in asks:
        now += later
        rates.wait_s(str(client), now)
        assert len(rates) <= most


@given(st.lists(st.floats(0, 3), min_size=1, max_size=100), st.integers(1, 5), st.floats(0.2, 5))
def test_never_more_than_the_burst_and_the_rate(gaps: list[float], burst: int, per_s: float) -> None:
    rates, now, taken = Rates(per_s, burst, 0), 0.0, 0
    for gap in gaps:
        now += gap
        taken += rates.wait_s("a", now) == 0
        assert taken <= burst + per_s * now + 1e-3
