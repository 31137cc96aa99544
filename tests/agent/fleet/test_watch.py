"""Which alarms are raised for what."""

from __future__ import annotations

import pytest

from agent.device.thermal import Cooling, Frequency, Thermal
from agent.fleet.watch import Watch, throttled
from agent.mqtt.alarms import Alarm
from agent.mqtt.settings import LimitOptions


class Ears(list[Alarm]):
    """What was told."""

    @property
    def said(self) -> list[tuple[str, bool]]:
        return [(alarm.name, alarm.raised) for alarm in self]


@pytest.fixture
def ears() -> Ears:
    return Ears()


def test_limits_and_their_other_sides(ears: Ears) -> None:
    watch = Watch(LimitOptions(), 120.0, ears.append)
    for temperature in (84.0, 86.0, 81.0, 79.0):
        watch.judge("temperature", temperature, 0.0)
    for free in (300.0, 255.0, 300.0, 321.0):
        watch.judge("storage_free", free, 0.0)
    for days in (15.0, 13.0, None, 300.0):
        watch.judge("certificate_days", days, 0.0)
    names = ("temperature", "storage_free", "certificate_days")
    assert ears.said == [(name, raised) for name in names for raised in (True, False)]


def test_a_limit_of_0_is_none(ears: Ears) -> None:
    watch = Watch(LimitOptions(temperature_c=0.0), 120.0, ears.append)
    watch.judge("temperature", 500.0, 0.0)
    assert ears == []


def test_what_the_link_raised_is_over_when_a_connection_held(ears: Ears) -> None:
    watch = Watch(LimitOptions(), 120.0, ears.append)
    watch.of_link("stuck", "30 s", 0.0)
    watch.of_link("stuck", "30 s", 10.0)
    watch.connected(20.0)
    watch.link_holds(100.0)
    assert watch.lost()
    assert not watch.lost()
    watch.link_holds(500.0)
    watch.connected(500.0)
    assert ears.said == [("stuck", True)]
    watch.link_holds(620.0)
    assert ears.said == [("stuck", True), ("stuck", False)]
    watch.link_holds(700.0)
    watch.of_link("stuck", "again", 701.0)
    assert ears.said[2:] == [("stuck", True)]


def test_what_slows_a_board_down_is_named() -> None:
    slow = Thermal((), (Cooling("cpufreq-cpu0", 2, 5), Cooling("pwm-fan", 3, 4)), (Frequency("0", 1.0, 1.5, 2.0),))
    assert throttled(slow) == "the board is slowed down: cpufreq-cpu0 at 2 of 5, cores 0 at most 1.5 of 2 MHz"
    assert "full speed" in throttled(Thermal((), (), ()))
