"""When a shared pass begins: time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.scheduling.gathering import PATIENCE, Gathering


def test_who_comes_alone_does_not_wait() -> None:
    gathering = Gathering(4)
    gathering.ended(requests=1, waiting=0, took_s=10, now=100)
    assert gathering.begins_at(ready=0, coming=0, now=100) is None
    assert gathering.begins_at(ready=1, coming=0, now=100.5) == 100.5


def test_a_pass_waits_for_slots_that_are_being_filled_but_not_long() -> None:
    gathering = Gathering(3)
    gathering.ended(requests=1, waiting=0, took_s=10, now=100)
    late = 200 + PATIENCE * 10
    assert gathering.begins_at(ready=1, coming=2, now=200) == late
    assert gathering.begins_at(ready=2, coming=1, now=200.3) == late
    assert gathering.begins_at(ready=3, coming=0, now=200.4) == 200.4
    assert gathering.begins_at(ready=2, coming=0, now=200.5) == 200.5  # one has gone
    assert gathering.begins_at(ready=2, coming=1, now=203) <= 203


@pytest.mark.parametrize(("requests", "waiting"), [(2, 0), (1, 1)])
def test_those_that_had_company_are_waited_for(requests: int, waiting: int) -> None:
    """Else two clients that ask one request after another would take turns for ever."""
    gathering = Gathering(2)
    gathering.ended(requests, waiting, took_s=10, now=100)
    assert gathering.begins_at(ready=1, coming=0, now=100.1) == 100 + PATIENCE * 10
    assert gathering.begins_at(ready=2, coming=0, now=100.2) == 100.2
    assert gathering.begins_at(ready=1, coming=0, now=200) == 200


@given(st.integers(0, 3), st.booleans(), st.floats(0, 1e3), st.floats(0, 1e6))
def test_where_nothing_is_shared_nobody_waits(coming: int, company: bool, took_s: float, now: float) -> None:
    gathering = Gathering(1)
    gathering.ended(1, int(company), took_s, now)
    assert gathering.begins_at(1, coming, now) == now
