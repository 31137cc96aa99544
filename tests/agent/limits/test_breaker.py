"""A breaker opens after failures in a row, lets one try, and keeps nobody out for the faults of another."""

from __future__ import annotations

from agent.limits.breaker import Breaker


def test_it_opens_after_failures_in_a_row_and_lets_one_try() -> None:
    breaker = Breaker(3, 5.0)
    assert [breaker.failed(None, 0.0) for _ in range(2)] == [False, False]
    assert not breaker.succeeded()
    assert [breaker.failed(None, 0.0) for _ in range(3)] == [False, False, True]
    assert breaker.wait_s(1, "a", 1.0) == 4.0
    assert breaker.wait_s(2, "a", 5.0) == 0
    assert breaker.wait_s(3, "b", 5.0) == 5.0
    assert breaker.succeeded()
    assert breaker.wait_s(4, "b", 5.0) == 0
    assert not breaker.is_open


def test_a_try_that_fails_keeps_it_open_and_one_that_goes_makes_room() -> None:
    breaker = Breaker(1, 5.0)
    assert breaker.failed(None, 0.0)
    assert breaker.wait_s(1, "a", 5.0) == 0
    assert not breaker.failed("a", 6.0)
    assert breaker.wait_s(2, "a", 6.0) == 5.0
    assert breaker.wait_s(3, "a", 11.0) == 0
    breaker.left(3)
    assert breaker.wait_s(4, "a", 11.0) == 0


def test_failures_of_one_client_keep_out_that_one() -> None:
    breaker = Breaker(2, 5.0)
    breaker.failed("a", 0.0)
    assert breaker.failed("a", 0.0)
    assert breaker.wait_s(1, "b", 0.0) == 0
    assert breaker.wait_s(2, "a", 0.0) == 5.0
    breaker.failed("b", 0.0)
    assert breaker.wait_s(3, "b", 0.0) == 5.0


def test_never() -> None:
    breaker = Breaker(0, 5.0)
    assert not any(breaker.failed(None, 0.0) for _ in range(100))
    assert breaker.wait_s(1, "a", 0.0) == 0
