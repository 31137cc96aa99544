"""The reason table."""

from __future__ import annotations

from agent.errors import TABLE, Reason


def test_every_reason_has_an_answer() -> None:
    assert set(TABLE) == set(Reason)


def test_only_what_passes_by_waiting_says_when_to_try_again() -> None:
    assert {reason for reason, answer in TABLE.items() if answer.retry_after_s} == {
        reason for reason, answer in TABLE.items() if answer.status == 503
    }
