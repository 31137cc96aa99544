"""Alarms: what is raised when a reading goes past a limit, and cleared when it has come back far enough. Pure.

An alarm says `raised` once and `cleared` once, however the reading flutters: it is raised when the reading was past the
limit for `after_s`, and cleared when it was back by the hysteresis for as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Limit:
    """When an alarm is raised: above `at`, or below it where not `above`; it is cleared `back` away from that."""

    name: str
    at: float
    back: float = 0.0
    above: bool = True
    after_s: float = 0.0
    unit: str = ""

    def is_past(self, value: float, raised: bool) -> bool:
        """Whether the alarm should stand, given that it does or does not."""
        edge = self.at - (self.back if raised else 0.0) * (1 if self.above else -1)
        return value > edge if self.above else value < edge


class Alarm(NamedTuple):
    """A change: `raised`, or cleared; `value` is the reading that did it, and `text` says it to people."""

    name: str
    raised: bool
    text: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    stood_s: float = 0.0


@dataclass
class _State:
    raised: bool = False
    since: float = 0.0
    """When it was raised."""
    turning: float | None = None
    """Since when the reading has been on the other side."""


class Alarms:
    """Which alarms stand. `judge` is for readings, `say` for what is known to be so or not."""

    def __init__(self, limits: Iterable[Limit]) -> None:
        self._limits = {limit.name: limit for limit in limits}
        self._states: dict[str, _State] = {}

    @property
    def standing(self) -> list[str]:
        """Those that are raised."""
        return sorted(name for name, state in self._states.items() if state.raised)

    def knows(self, name: str) -> bool:
        """Whether there is a limit of that name."""
        return name in self._limits

    def judge(self, name: str, value: float | None, now: float) -> Alarm | None:
        """What a reading changes, if anything. None as a reading says nothing: the alarm stays as it is."""
        limit = self._limits[name]
        if value is None:
            return None
        state = self._states.setdefault(name, _State())
        if limit.is_past(value, state.raised) == state.raised:
            state.turning = None
            return None
        if state.turning is None:
            state.turning = now
        if now - state.turning < limit.after_s:
            return None
        side = f"{'no longer ' if state.raised else ''}{'above' if limit.above else 'below'}"
        text = f"{name} is {value:.4g}{limit.unit}, {side} {limit.at:g}{limit.unit}"
        return self._turn(Alarm(name, not state.raised, text, value, limit.at, limit.unit), state, now)

    def say(self, name: str, raised: bool, text: str, now: float) -> Alarm | None:
        """Raise it, or clear it; None where it stands like that already."""
        state = self._states.setdefault(name, _State())
        if state.raised == raised:
            return None
        return self._turn(Alarm(name, raised, text), state, now)

    def _turn(self, alarm: Alarm, state: _State, now: float) -> Alarm:
        stood_s = 0.0 if alarm.raised else now - state.since
        state.raised, state.turning = alarm.raised, None
        if alarm.raised:
            state.since = now
        return alarm._replace(stood_s=stood_s)
