"""When an engine is started again, and when no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.engine.supervisor import FIRST_WAIT_S, LONGEST_WAIT_S, Backoff


def test_waits_double_and_end() -> None:
    backoff = Backoff(5, 300.0)
    waits = [backoff.died(float(at)) for at in range(6)]
    assert waits == [0.0, FIRST_WAIT_S, FIRST_WAIT_S * 2, FIRST_WAIT_S * 4, FIRST_WAIT_S * 8, None]


def test_none_is_tried_where_none_is_allowed() -> None:
    assert Backoff(0, 300.0).died(0.0) is None


@given(st.integers(1, 20), st.floats(1, 1e4), st.lists(st.floats(0, 1e4), max_size=60))
def test_a_death_counts_for_one_window(most: int, window_s: float, gaps: list[float]) -> None:
    backoff = Backoff(most, window_s)
    now, deaths = 0.0, []
    for gap in gaps:
        now += gap
        deaths = [each for each in deaths if each > now - window_s] + [now]
        wait_s = backoff.died(now)
        if len(deaths) > most:
            assert wait_s is None
            return
        assert wait_s == (0.0 if len(deaths) == 1 else min(FIRST_WAIT_S * 2 ** (len(deaths) - 2), LONGEST_WAIT_S))
