"""When something was: UTC and what that clock was worth, beside a clock that nobody sets. `restamp` is pure.

A board without a battery starts in 1970, or when it was last shut down, and learns the time minutes later. So every
moment has the nanoseconds since the boot (CLOCK_BOOTTIME: it never jumps, and counts suspension) and which boot it was;
order and age come from these alone. When the message is sent, and the time is known by then, its UTC is worked out
anew, and the message says so.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

# Before this was written no clock can have been right.
_PLAUSIBLE_NS = 1_735_689_600 * 10**9
_LOOK_NS = 10**9
# From <linux/timex.h>: what clock_adjtime answers, and bits of its status.
_TIME_ERROR, _STA_UNSYNC, _STA_PPSSIGNAL = 5, 0x0040, 0x0100


class Quality(str, enum.Enum):
    """What set the clock, from worst to best."""

    UNSYNCED = "unsynced"
    RTC = "rtc"
    NTP = "ntp"
    GNSS = "gnss"
    PTP = "ptp"

    @property
    def is_synced(self) -> bool:
        return self not in (Quality.UNSYNCED, Quality.RTC)


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """`mono_ns` since the boot `boot_id`; `utc_ns` as the clock had it then."""

    mono_ns: int
    boot_id: str
    utc_ns: int
    quality: Quality


class Stamp(msgspec.Struct, frozen=True):
    """A moment as it is said: `restamped` where its UTC was not what the clock had."""

    utc_ns: int
    quality: Quality
    restamped: bool


class Facts(msgspec.Struct, frozen=True):
    """What the machine says of its clock. `declared`: what the operator says that disciplines it."""

    kernel_synced: bool = False
    pps: bool = False
    timesyncd: bool = False
    has_rtc: bool = False
    declared: Quality | None = None


def quality_of(facts: Facts, utc_ns: int) -> Quality:
    """The kernel knows whether its clock is disciplined, and not by what: where nobody says so it is taken for NTP."""
    if facts.kernel_synced or facts.timesyncd:
        return facts.declared or (Quality.GNSS if facts.pps else Quality.NTP)
    return Quality.RTC if facts.has_rtc and utc_ns >= _PLAUSIBLE_NS else Quality.UNSYNCED


def restamp(made: Moment, now: Moment, known: Mapping[str, Moment] | None = None) -> Stamp:
    """What is to be said of `made` at `now`. `known`: of earlier boots, a moment at which the time was known."""
    sure = now if now.boot_id == made.boot_id else (known or {}).get(made.boot_id)
    if made.quality.is_synced or sure is None or not sure.quality.is_synced:
        return Stamp(made.utc_ns, made.quality, False)
    return Stamp(sure.utc_ns - sure.mono_ns + made.mono_ns, sure.quality, True)


def age_s(made: Moment, now: Moment) -> float | None:
    """How long ago that was; None where nobody knows: of another boot, and one of the two without a clock."""
    if made.boot_id == now.boot_id:
        return max(0, now.mono_ns - made.mono_ns) / 1e9
    if made.quality.is_synced and now.quality.is_synced:
        return max(0, now.utc_ns - made.utc_ns) / 1e9
    return None


class Clock:
    """This machine's. `root` is where its /proc, /run and /sys are."""

    def __init__(self, declared: Quality | None = None, root: Path = Path("/")) -> None:
        self._declared, self._root = declared, root
        self._boot_id = (root / "proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        self._quality, self._next_look_ns = Quality.UNSYNCED, 0

    def now(self) -> Moment:
        """What it is now; how good the clock is, is looked up once a second."""
        mono_ns, utc_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
        if mono_ns >= self._next_look_ns:
            self._quality, self._next_look_ns = quality_of(self.facts(), utc_ns), mono_ns + _LOOK_NS
        return Moment(mono_ns, self._boot_id, utc_ns, self._quality)

    def facts(self) -> Facts:
        """What the machine says."""
        synced, pps = _kernel()
        return Facts(
            kernel_synced=synced,
            pps=pps,
            timesyncd=(self._root / "run/systemd/timesync/synchronized").exists(),
            has_rtc=(self._root / "sys/class/rtc/rtc0").exists(),
            declared=self._declared,
        )


class _Timex(ctypes.Structure):
    """The beginning of struct timex (clock_adjtime(2)), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _kernel() -> tuple[bool, bool]:
    """Whether the kernel's clock is disciplined, and whether by a pulse; asked without changing anything."""
    timex = _Timex(modes=0)
    state = ctypes.CDLL(None, use_errno=True).clock_adjtime(time.CLOCK_REALTIME, ctypes.byref(timex))
    synced = 0 <= state < _TIME_ERROR and not timex.status & _STA_UNSYNC
    return synced, bool(timex.status & _STA_PPSSIGNAL)
