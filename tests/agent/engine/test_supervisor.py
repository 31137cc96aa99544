"""When an engine is started again, and when no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.engine.channel import Pass, Ready, Run
from agent.engine.supervisor import FIRST_WAIT_S, HANG_FACTOR, LONGEST_WAIT_S, Backoff, Patience


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


# --- how long a pass may take


def pass_of(*batches: list[int]) -> Pass:
    """Batches of runs with so many bytes each."""
    return Pass(tuple(tuple(Run(1, 0, ((1,),), (nbytes,), (0,)) for nbytes in batch) for batch in batches))


def ready_of(warm_s: float, sample_bytes: int, *costs: tuple[int, float]) -> Ready:
    return Ready("runtime", 1.0, warm_s, {}, costs, sample_bytes)


def test_a_pass_may_take_many_times_what_the_sample_took() -> None:
    patience = Patience(10.0)
    assert patience.limit_s(pass_of([100])) == 10.0
    patience.ready(ready_of(0.01, 100, (1, 0.009)))
    assert patience.limit_s(pass_of([100])) == 10.0
    patience.ready(ready_of(2.0, 100, (1, 1.5), (2, 2.5)))
    assert patience.limit_s(pass_of([100])) == HANG_FACTOR * 2.5
    # Of large shapes more is expected, though nobody has seen one yet; and of two batches twice as much.
    assert patience.limit_s(pass_of([400])) == patience.limit_s(pass_of([200, 200])) == HANG_FACTOR * 8.0
    assert patience.limit_s(pass_of([400], [100])) == HANG_FACTOR * 10.5


def test_what_was_seen_counts_and_a_cold_start_forgets_nothing() -> None:
    patience = Patience(1.0)
    patience.passed(3.0)
    patience.passed(1.0)
    patience.ready(ready_of(0.5, 100))
    patience.ready(ready_of(0.0, 0))
    assert patience.limit_s(pass_of([1])) == HANG_FACTOR * 3.0
    assert patience.limit_s(pass_of([1000])) == HANG_FACTOR * 5.0
