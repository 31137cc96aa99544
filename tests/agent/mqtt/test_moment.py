"""Clocks that are wrong, jump, and become right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.moment import Clock, Facts, Moment, Quality, age_s, quality_of, restamp

YEAR_NS = 365 * 86400 * 10**9
NOW_NS = 1_800_000_000 * 10**9
NEVER = Quality.UNSYNCED


@given(
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.sampled_from([NEVER, Quality.RTC]),
    st.integers(-YEAR_NS, YEAR_NS),
)
def test_what_was_made_before_the_clock_was_set_is_told_right(mono_ns: int, later: int, bad: Quality, off: int) -> None:
    now = Moment(mono_ns + later, "b", NOW_NS, Quality.NTP)
    stamp = restamp(Moment(mono_ns, "b", off, bad), now)
    assert (stamp.utc_ns, stamp.quality, stamp.restamped) == (NOW_NS - later, Quality.NTP, True)


@given(st.integers(-YEAR_NS, YEAR_NS))
def test_what_was_made_by_a_set_clock_is_never_rewritten(jump: int) -> None:
    made = Moment(5, "b", NOW_NS, Quality.GNSS)
    stamp = restamp(made, Moment(10, "b", NOW_NS + jump, Quality.PTP))
    assert (stamp.utc_ns, stamp.quality, stamp.restamped) == (NOW_NS, Quality.GNSS, False)


def test_another_boot_is_told_right_only_where_its_time_became_known() -> None:
    made, now = Moment(5, "old", 7, NEVER), Moment(1, "new", NOW_NS, Quality.NTP)
    assert not restamp(made, now).restamped
    known = {"old": Moment(105, "old", NOW_NS - 900, Quality.NTP)}
    assert restamp(made, now, known).utc_ns == NOW_NS - 1000


@pytest.mark.parametrize("jump", [-YEAR_NS, YEAR_NS])
def test_a_jump_makes_nothing_older(jump: int) -> None:
    made = Moment(10**9, "b", NOW_NS, Quality.NTP)
    assert age_s(made, Moment(3 * 10**9, "b", NOW_NS + jump, Quality.NTP)) == 2


def test_the_age_of_another_boot_needs_two_clocks() -> None:
    made = Moment(10**9, "a", NOW_NS, Quality.NTP)
    assert age_s(made, Moment(1, "b", NOW_NS + 10**9, Quality.NTP)) == 1
    assert age_s(made, Moment(1, "b", NOW_NS, NEVER)) is None


@pytest.mark.parametrize(
    ("facts", "utc_ns", "quality"),
    [
        (Facts(), NOW_NS, NEVER),
        (Facts(has_rtc=True), NOW_NS, Quality.RTC),
        (Facts(has_rtc=True), 0, NEVER),
        (Facts(kernel_synced=True), NOW_NS, Quality.NTP),
        (Facts(timesyncd=True), NOW_NS, Quality.NTP),
        (Facts(kernel_synced=True, pps=True), NOW_NS, Quality.GNSS),
        (Facts(kernel_synced=True, declared=Quality.PTP), NOW_NS, Quality.PTP),
        (Facts(declared=Quality.PTP), NOW_NS, NEVER),
    ],
)
def test_what_the_machine_says_makes_the_quality(facts: Facts, utc_ns: int, quality: Quality) -> None:
    assert quality_of(facts, utc_ns) is quality


def test_this_machines_clock(tmp_path: Path) -> None:
    clock = Clock()
    first, second = clock.now(), clock.now()
    assert first.mono_ns <= second.mono_ns
    assert first.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip() == second.boot_id
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("x\n")
    (tmp_path / "run/systemd/timesync").mkdir(parents=True)
    (tmp_path / "run/systemd/timesync/synchronized").touch()
    there = Clock(root=tmp_path).now()
    assert (there.boot_id, there.quality.is_synced) == ("x", True)
