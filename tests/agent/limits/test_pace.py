"""Clients that are too slow are found, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.limits.pace import Pace


def outlives(pace: Pace, sent: list[tuple[float, int]]) -> tuple[float, str]:
    """(when, why) it is too slow for somebody who has sent so much by then, looked at whenever it asks to be."""
    now = 0.0
    while True:
        now += pace.left_s(now)
        moved = max((total for at, total in sent if at <= now), default=0)
        if why := pace.too_slow(moved, now):
            return now, why


def test_all_of_it_has_an_end_however_fast() -> None:
    fast = [(float(second), second * 1_000_000) for second in range(100)]
    assert outlives(Pace(30, 240, 5, 0.0), fast) == (30.0, "within 30 s")


def test_who_sends_next_to_nothing_is_found_in_the_first_period() -> None:
    drops = [(float(second), second) for second in range(100)]
    assert outlives(Pace(30, 240, 5, 0.0), drops) == (5.0, "at 240 bytes a second")


def test_what_was_fast_at_first_is_no_credit() -> None:
    assert outlives(Pace(1000, 240, 5, 0.0), [(1.0, 10_000_000)])[0] == 10.0


def test_without_a_rate_only_the_end_counts() -> None:
    assert outlives(Pace(30, 0, 5, 0.0), []) == (30.0, "within 30 s")


def test_what_the_agent_did_not_read_is_not_the_clients_fault() -> None:
    pace = Pace(30, 240, 5, 0.0)
    pace.stood_still(100.0)
    assert pace.too_slow(0, 104.9) == ""
    assert pace.too_slow(0, 105.0) == "at 240 bytes a second"


@given(st.floats(1, 100), st.integers(100, 10_000), st.floats(1, 10), st.floats(1.05, 10))
def test_who_keeps_the_rate_has_all_the_time(whole_s: float, rate: int, period_s: float, faster: float) -> None:
    pace, now = Pace(whole_s, rate, period_s, 0.0), 0.0
    while True:
        now += pace.left_s(now)
        if why := pace.too_slow(round(rate * faster * now + 1), now):
            assert why.startswith("within")
            assert now >= whole_s
            return
