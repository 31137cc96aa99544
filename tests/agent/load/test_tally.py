"""Accounting with given times: what counts from when, and how failures are told apart."""

from __future__ import annotations

import json

import pytest

from agent.load.report import Slo, run_of
from agent.load.tally import OTHER, SLOWEST, Measured, Outcome, Tally, failure_of
from targets.errors import TightfitError


def outcome(due: float, ended: float, failure: str = "", began: float | None = None, **fields: bool) -> Outcome:
    began = due if began is None else began
    return Outcome(f"{due:g}", due, began, ended, fields.pop("was_ready", began == due), failure, **fields)


def tally_of(*outcomes: Outcome, deadline: float | None = None) -> Tally:
    tally = Tally()
    for each in outcomes:
        tally.add(each, deadline)
    return tally


def test_latency_counts_from_when_a_request_was_due() -> None:
    tally = tally_of(outcome(1.0, 2.5, began=2.0))
    assert tally.latency.max == 1_500_000_000
    assert (tally.waiting.max, tally.lateness.count) == (1_000_000_000, 0)


def test_lateness_is_the_generators_own() -> None:
    tally = tally_of(outcome(1.0, 2.5, began=1.25, was_ready=True))
    assert (tally.lateness.max, tally.waiting.count) == (250_000_000, 0)


def test_goodput_is_what_came_in_time() -> None:
    tally = tally_of(outcome(0, 0.1), outcome(0, 0.3), outcome(0, 0.1, "503 full"), deadline=0.2)
    assert (tally.requests, tally.answered, tally.in_time) == (3, 2, 1)
    run, _ = run_of(3, None, 1.0, ["all"], Measured([tally], end_s=2.0), ())
    assert (run.all.offered_per_s, run.all.answered_per_s, run.all.goodput_per_s) == (3, 1, 0.5)


def test_refusals_have_no_latency_and_the_given_up_have_the_least() -> None:
    tally = tally_of(outcome(0, 0.1, "503 full"), outcome(0, 2.0, "no answer within 2 s", given_up=True))
    assert (tally.latency.count, tally.latency.max) == (1, 2_000_000_000)


@pytest.mark.parametrize(("refused", "kept"), [(0, True), (1, True), (2, False)])
def test_a_promise_counts_the_refused_as_never_answered(refused: int, kept: bool) -> None:
    tally = tally_of(*[outcome(0, 0.01)] * (100 - refused), *[outcome(0, 0.001, "503 full")] * refused)
    assert Slo.parse("p99=20ms").kept(tally) is kept
    assert Slo.parse("max=20ms").kept(tally) is (refused == 0)
    assert not Slo.parse("p50=9ms").kept(tally)


def test_promises() -> None:
    assert Slo.parse("p99.9=0.2s") == Slo("p99.9=0.2s", pytest.approx(0.999), 0.2)
    for text in ("", "p99", "p99=50", "p100=5ms", "p99=0ms", "q99=5ms", "p99=-5ms", "p99=5ms,p50=1ms"):
        with pytest.raises(TightfitError, match="--slo"):
            Slo.parse(text)


def test_tallies_merge() -> None:
    parts = [tally_of(outcome(at, at + at / 10), outcome(at, at, f"{at} x")) for at in (1, 2, 3, 4)]
    total = Tally()
    for part in parts:
        total.merge(part)
    assert (total.requests, total.answered, total.failures["2 x"]) == (8, 4, 1)
    assert total.latency.max == 400_000_000
    assert [trace for _, trace in sorted(total.slowest, reverse=True)] == ["4", "3", "2", "1"]


def test_memory_is_bounded() -> None:
    tally = tally_of(*(outcome(at, 2 * at, f"reason {at}" if at % 2 else "") for at in range(500)))
    assert len(tally.failures) == 33
    assert tally.failures[OTHER] == 250 - 32
    assert sorted(latency for latency, _ in tally.slowest) == [490, 492, 494, 496, 498]
    assert len(tally.slowest) == SLOWEST


def test_refusals_that_differ_in_a_number_are_of_one_class() -> None:
    bodies = [json.dumps({"error": f"the queue is full: {n} are waiting"}).encode() for n in (1, 22, 3.5)]
    assert {failure_of(503, body) for body in bodies} == {"503 the queue is full: N are waiting"}
    assert failure_of(502, b"<html>") == "502 without a message"
    assert failure_of(500, b'{"detail": "x"}') == "500 without a message"
    long = failure_of(400, json.dumps({"error": "a\n\x1b[31m" + "b" * 500}).encode())
    assert len(long) < 100
    assert long.isprintable()
