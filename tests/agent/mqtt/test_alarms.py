"""Alarms are raised once and cleared once."""

from __future__ import annotations

from agent.mqtt.alarms import Alarms, Limit


def changes(limit: Limit, *readings: tuple[float, float | None]) -> list[tuple[float, bool]]:
    """(when, whether it was raised) for readings (when, value)."""
    alarms = Alarms([limit])
    found = [(now, alarms.judge(limit.name, value, now)) for now, value in readings]
    return [(now, alarm.raised) for now, alarm in found if alarm is not None]


def test_raised_and_cleared_with_hysteresis() -> None:
    limit = Limit("hot", 80.0, 5.0)
    assert changes(limit, (0, 79), (1, 81), (2, 90), (3, 79), (4, 76), (5, 74.9), (6, 79)) == [(1, True), (5, False)]


def test_below_a_limit() -> None:
    limit = Limit("free", 100.0, 25.0, above=False)
    assert changes(limit, (0, 101), (1, 99), (2, 110), (3, 124), (4, 126)) == [(1, True), (4, False)]


def test_what_flutters_is_no_alarm() -> None:
    limit = Limit("hot", 80.0, after_s=10.0)
    assert changes(limit, (0, 81), (5, 79), (6, 81), (12, 81), (16, 81), (17, 79), (20, 81), (21, 79), (31, 79)) == [
        (16, True),
        (31, False),
    ]


def test_a_sensor_that_says_nothing_changes_nothing() -> None:
    assert changes(Limit("hot", 80.0), (0, 81), (1, None), (2, 81), (3, 79)) == [(0, True), (3, False)]


def test_what_it_says() -> None:
    alarms = Alarms([Limit("hot", 80.0, unit=" C")])
    raised = alarms.judge("hot", 81.25, 10.0)
    assert raised is not None
    assert (raised.value, raised.limit, raised.text) == (81.25, 80.0, "hot is 81.25 C, above 80 C")
    assert alarms.standing == ["hot"]
    cleared = alarms.judge("hot", 12.0, 70.0)
    assert cleared is not None
    assert (cleared.stood_s, cleared.text) == (60.0, "hot is 12 C, no longer above 80 C")
    assert alarms.standing == []


def test_what_is_known_to_be_so_is_said_once() -> None:
    alarms = Alarms([])
    assert alarms.say("stuck", raised=False, text="", now=0.0) is None
    assert alarms.say("stuck", raised=True, text="why", now=1.0) is not None
    assert alarms.say("stuck", raised=True, text="why", now=2.0) is None
    cleared = alarms.say("stuck", raised=False, text="", now=4.0)
    assert cleared is not None
    assert cleared.stood_s == 3.0
