"""The newest refusals: bounded, and one entry for those that follow each other closely."""

from __future__ import annotations

from agent.errors import Reason
from agent.refusals import TOGETHER_S, Refusals


def test_what_is_refused_again_and_again_is_one_entry() -> None:
    refusals = Refusals()
    refusals.note("m", Reason.DEADLINE, "late", 100.0)
    for at in range(1000):
        refusals.note("m", Reason.QUEUE_FULL, f"{at} wait", 101.0 + at)
    full, late = refusals.newest()
    assert (full.count, full.message, full.first_s, full.last_s) == (1000, "999 wait", 101.0, 1100.0)
    assert (late.reason, late.count) == (Reason.DEADLINE, 1)


def test_the_last_refused_is_first_and_after_a_while_it_is_another_entry() -> None:
    refusals = Refusals()
    refusals.note("a", Reason.SHED, "", 0.0)
    refusals.note("b", Reason.SHED, "", 1.0)
    refusals.note("a", Reason.SHED, "", 2.0)
    assert [each.model for each in refusals.newest()] == ["a", "b"]
    refusals.note("a", Reason.SHED, "", 2.0 + TOGETHER_S)
    assert [(each.model, each.count) for each in refusals.newest()] == [("a", 1), ("a", 2), ("b", 1)]


def test_it_is_bounded_in_entries_and_in_text() -> None:
    refusals = Refusals(most=3)
    for at in range(100):
        refusals.note(f"{at:02}".ljust(200, "x"), Reason.BAD_REQUEST, "x" * 10_000, float(at))
    newest = refusals.newest()
    assert len(newest) == 3
    assert all(len(each.model) == 100 and len(each.message) == 300 for each in newest)
    # One that was forgotten begins anew.
    refusals.note("00".ljust(200, "x"), Reason.BAD_REQUEST, "", 100.0)
    assert refusals.newest()[0].count == 1
