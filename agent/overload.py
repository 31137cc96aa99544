"""Degradation at work: measures what presses, and says what the agent does less of meanwhile (`agent.degradation`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from agent import log
from agent.config import DegradationOptions
from agent.degradation import Degradation, Misses, Pressure, Step
from agent.errors import Reason, RefusedError
from agent.telemetry import Telemetry

Governor = Callable[[], int]
"""Says how much heat or power press now: 0 (not at all) to 3."""

# Looks so often within the time that pressure must last.
_LOOKS = 4


def no_governor() -> int:
    """Where nothing watches heat and power."""
    return 0


class Overload:
    """Looks a few times a second, once it is started. `fullest` says how full the fullest queue is, 0..1;
    `on_change` hears of every change: level, the one before, what it is called, and what pressed."""

    def __init__(
        self,
        options: DegradationOptions,
        telemetry: Telemetry,
        fullest: Callable[[], float],
        governor: Governor,
        on_change: Callable[[int, int, str, str], None] = lambda *_: None,
    ) -> None:
        self._policy = Degradation(options.rise_s, options.hold_s)
        self._misses = Misses()
        self._every_s = options.rise_s / _LOOKS
        self._telemetry, self._fullest, self._governor = telemetry, fullest, governor
        self._on_change = on_change
        self._log = log.get("overload")
        self._cause = ""
        self._timer: asyncio.TimerHandle | None = None
        watch = telemetry.watch_one
        watch("tightfit_degradation_level", "0 (normal) to 3 (low priorities shed).", lambda: self._policy.level)
        watch("tightfit_frame_rate", "The part of a stream's frames that are taken.", lambda: self.step.frame_rate)

    @property
    def level(self) -> int:
        """0 (normal) to 3."""
        return self._policy.level

    @property
    def cause(self) -> str:
        """What pressed when the level was raised; empty while it is 0."""
        return self._cause if self.level else ""

    @property
    def step(self) -> Step:
        """What is reduced now."""
        return self._policy.step

    def start(self) -> None:
        """Look now, and again and again until `close`."""
        self.look(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self.start)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def settled(self, reason: Reason, others: int) -> None:
        """A request has ended while so many others were there: alone, a missed deadline was too short for any agent."""
        self._misses.count(reason is Reason.DEADLINE and others > 0, time.monotonic())

    def check(self, priority: int) -> None:
        """Raise RefusedError where requests of that priority are shed."""
        shed_from = self.step.shed_from
        if shed_from is not None and priority >= shed_from:
            raise RefusedError(
                Reason.SHED,
                f"requests of priority {priority} are not taken under pressure ({self._cause})",
                f"from priority {shed_from} on they are refused now; 1 is the highest",
            )

    def look(self, now: float) -> None:
        """Measure, and change the level where that is due."""
        pressure = Pressure(self._governor(), self._fullest(), self._misses.rate(now))
        before = self._policy.level
        if not self._policy.update(pressure, now):
            return
        level: Any = self._policy.level
        if level > before:
            self._cause = pressure.cause
        self._telemetry.degraded(self._cause, level > before)
        self._on_change(level, before, self.step.name, self._cause)
        write = self._log.warning if level > before else self._log.info
        write(
            "degradation", to=level, before=before, step=self.step.name, cause=self._cause,
            governor=pressure.governor, queue=round(pressure.queue, 2), misses=round(pressure.misses, 3),
        )  # fmt: skip
