"""How far service is reduced under pressure, and back. Pure: time is an argument, and nothing here waits.

Theory of operation. Three things press: heat or power (a governor says how much), requests that wait, and deadlines
that are missed. Each is put on one scale, 0 (none) to 3, and the hardest of them is the demand. The level follows it,
fast up and slowly down:

    up    to the highest level that every demand of the last `rise_s` seconds reached, at once
    down  by one, when for `hold_s` seconds no demand would have raised it to where it is

So one burst changes nothing, a level once taken holds for `hold_s`, and a reduction that removes its own cause (fewer
requests wait because some are shed) can swing no faster than that. Harder pressure never gives a lower level: the first
rule is a minimum over a window and the second a maximum, and both keep order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

LEVELS = range(4)


@dataclass(frozen=True, slots=True)
class Step:
    """What a level means. `frame_rate` is the part of a stream's frames that are still taken; with `lighter` the
    lighter variant of a model answers where one is named; requests of priority `shed_from` and below it (the numbers
    go up as the priority goes down) are refused, None for no request."""

    name: str
    frame_rate: float
    lighter: bool
    shed_from: int | None


# The default priority, 128, is never shed: it is that of everybody who said nothing.
STEPS = (
    Step("normal", 1.0, lighter=False, shed_from=None),
    Step("half the frames", 0.5, lighter=False, shed_from=None),
    Step("lighter variants", 0.5, lighter=True, shed_from=192),
    Step("low priorities shed", 0.25, lighter=True, shed_from=129),
)

# From which value on a pressure demands level 1, 2, 3. Half a queue is waiting by design; a full one refuses already.
_QUEUE = (0.5, 0.75, 0.95)
# One miss in twenty is what a p95 target allows.
_MISSES = (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Pressure:
    """`governor`: 0..3, of heat or power. `queue`: how full the fullest queue is, 0..1. `misses`: the part of requests
    that missed their deadline lately, 0..1."""

    governor: int = 0
    queue: float = 0.0
    misses: float = 0.0

    @property
    def demand(self) -> int:
        """The level it asks for."""
        return max(self._levels())

    @property
    def cause(self) -> str:
        """Which of the three asks for most; empty where none does."""
        names = ("governor", "queue", "misses")
        return names[self._levels().index(self.demand)] if self.demand else ""

    def _levels(self) -> tuple[int, int, int]:
        governor = min(max(self.governor, 0), LEVELS[-1])
        return governor, bisect_right(_QUEUE, self.queue), bisect_right(_MISSES, self.misses)


class Degradation:
    """The level that holds now, moved by `update`, which is to be called a few times within `rise_s`."""

    def __init__(self, rise_s: float = 1.0, hold_s: float = 30.0) -> None:
        self.level = 0
        self._rise_s = rise_s
        self._hold_s = hold_s
        # Since when every demand has reached a level, by level.
        self._reached = [-math.inf] + [math.inf] * LEVELS[-1]
        self._held = -math.inf

    @property
    def step(self) -> Step:
        """What the level means."""
        return STEPS[self.level]

    def update(self, pressure: Pressure, now: float) -> bool:
        """Take in the pressure of this moment; True when the level has changed."""
        before, demand = self.level, pressure.demand
        for level in LEVELS[1:]:
            self._reached[level] = min(self._reached[level], now) if demand >= level else math.inf
        sustained = max(level for level in LEVELS if now - self._reached[level] >= self._rise_s)
        if sustained >= self.level:
            self.level, self._held = sustained, now
        elif now - self._held >= self._hold_s:
            self.level, self._held = self.level - 1, now
        return self.level != before


# Fewer requests than this, lately, and a miss among them says little.
_FEW = 10.0


class Misses:
    """The part of requests that missed their deadline, where each counts less with time: by e within `memory_s`."""

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._at = 0.0
        self._ended = 0.0
        self._missed = 0.0

    def count(self, missed: bool, now: float) -> None:
        """One request has ended."""
        self._forget(now)
        self._ended += 1
        self._missed += missed

    def rate(self, now: float) -> float:
        """0..1; where there were hardly any requests, as if there had been ten."""
        self._forget(now)
        return self._missed / max(self._ended, _FEW)

    def _forget(self, now: float) -> None:
        left = math.exp((self._at - now) / self._memory_s) if self._ended else 0.0
        self._at = now
        self._ended *= left
        self._missed *= left
