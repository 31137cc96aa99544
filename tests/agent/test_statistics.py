"""Where a request's time is counted, and how long."""

from __future__ import annotations

from agent.calls import Call
from agent.statistics import Ledger, Statistics


def call(**times: float) -> Call:
    answered = Call(1, 10.0, 99.0, "client")
    for name, value in times.items():
        setattr(answered, name, value)
    return answered


def test_a_requests_time_is_cut_where_it_was_let_in_queued_begun_and_answered() -> None:
    statistics = Statistics()
    times = {"seated": 11.0, "queued": 13.0, "began": 16.0, "compute_s": 4.0, "ended": 20.5, "rows": 3}
    statistics.settled(call(**times), True, 21.0, 1234.5)
    shown = statistics.shown("m", "v")
    assert shown["inference_stats"] == {
        "success": {"count": 1, "ns": 11_000_000_000},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 1, "ns": 4_000_000_000},
        "compute_input": {"count": 1, "ns": 2_000_000_000},
        "compute_infer": {"count": 1, "ns": 4_000_000_000},
        "compute_output": {"count": 1, "ns": 500_000_000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert (shown["inference_count"], shown["last_inference"]) == (3, 1_234_500)


def test_failures_count_as_such_alone() -> None:
    statistics = Statistics()
    statistics.settled(call(seated=11.0, queued=12.0, began=13.0, ended=14.0), False, 15.0, 1.0)
    shown = statistics.shown("m", "v")
    assert shown["inference_stats"].pop("fail") == {"count": 1, "ns": 5_000_000_000}
    assert all(each == {"count": 0, "ns": 0} for each in shown["inference_stats"].values())
    assert (shown["inference_count"], shown["last_inference"]) == (0, 0)


def test_kept_answers_are_no_inferences() -> None:
    statistics = Statistics()
    statistics.settled(call(seated=10.0, cache_s=0.5, cache_hit=True), True, 12.0, 1.0)
    missed = {"seated": 10.0, "queued": 10.0, "began": 10.0, "ended": 11.0, "cache_s": 0.25, "cache_hit": False}
    statistics.settled(call(**missed), True, 12.0, 1.0)
    shown = statistics.shown("m", "v")
    assert shown["inference_stats"]["cache_hit"] == {"count": 1, "ns": 500_000_000}
    assert shown["inference_stats"]["cache_miss"] == {"count": 1, "ns": 250_000_000}
    assert shown["inference_stats"]["compute_infer"]["count"] == shown["inference_count"] == 1


def test_executions_by_rows() -> None:
    statistics = Statistics()
    for rows in (4, 1, 4):
        statistics.executed(rows, 0.5)
    shown = statistics.shown("m", "v")
    assert shown["execution_count"] == 3
    found = [(each["batch_size"], each["compute_infer"]) for each in shown["batch_stats"]]
    assert found == [(1, {"count": 1, "ns": 500_000_000}), (4, {"count": 2, "ns": 1_000_000_000})]


def test_however_many_sizes_and_versions_there_are_it_stays_small() -> None:
    statistics = Statistics()
    for rows in range(1, 10_000):
        statistics.executed(rows, 0.0)
    assert statistics.executions == 9_999
    assert len(statistics.batches) < 1000
    ledger = Ledger()
    served = ledger.of("m", "served", [])
    first = ledger.of("m", "0", [])
    for version in range(1000):
        ledger.of("m", str(version), [("m", "served")])
    assert ledger.of("m", "served", []) is served
    assert ledger.of("m", "999", []) is ledger.of("m", "999", [])
    assert ledger.of("m", "0", []) is not first
