"""Which alarms are raised for what: figures past their limits, and what the link says. Pure."""

from __future__ import annotations

from collections.abc import Callable

from agent.device.thermal import Thermal
from agent.fleet.figures import throttling
from agent.mqtt.alarms import Alarm, Alarms, Limit
from agent.mqtt.settings import LimitOptions


class Watch:
    """Has `tell` hear of every alarm that is raised or cleared."""

    def __init__(self, options: LimitOptions, stable_s: float, tell: Callable[[Alarm], None]) -> None:
        self._alarms = Alarms(_limits(options))
        self._stable_s, self._tell = stable_s, tell
        self._of_link: set[str] = set()
        self._connected_at: float | None = None

    def judge(self, name: str, value: float | None, now: float) -> None:
        """A reading, which is nothing where no limit is set."""
        if self._alarms.knows(name):
            self._changed(self._alarms.judge(name, value, now))

    def say(self, name: str, *, raised: bool, text: str, now: float) -> None:
        """What is known to be so or not."""
        self._changed(self._alarms.say(name, raised=raised, text=text, now=now))

    def of_link(self, name: str, text: str, now: float) -> None:
        """The link says so each time; here it is raised once."""
        self._of_link.add(name)
        self.say(name, raised=True, text=text, now=now)

    def connected(self, now: float) -> None:
        """A connection began."""
        self._connected_at = now

    def lost(self) -> bool:
        """There is none: whether there was one."""
        was, self._connected_at = self._connected_at is not None, None
        return was

    def link_holds(self, now: float) -> None:
        """What the link raised is over when a connection has held for long enough; to be called now and then."""
        if self._connected_at is None or now - self._connected_at < self._stable_s:
            return
        for name in sorted(self._of_link):
            self.say(name, raised=False, text=f"a connection has held for {self._stable_s:g} s", now=now)
        self._of_link.clear()

    def _changed(self, alarm: Alarm | None) -> None:
        if alarm is not None:
            self._tell(alarm)


def _limits(options: LimitOptions) -> list[Limit]:
    """Those that are to be raised at all."""
    limits = (
        Limit("temperature", options.temperature_c, 5.0, unit=" C"),
        Limit("storage_free", options.storage_free_mib, options.storage_free_mib / 4, above=False, unit=" MiB"),
        Limit("storage_life", options.storage_life, 5.0, unit=" %"),
        Limit("certificate_days", options.certificate_days, 1.0, above=False, unit=" days"),
        Limit("memory", options.memory, 5.0, unit=" %"),
        Limit("misses", options.misses, options.misses / 2, unit=" %"),
    )
    return [limit for limit in limits if limit.at > 0]


def throttled(thermal: Thermal) -> str:
    by = ", ".join(throttling(thermal))
    return f"the board is slowed down: {by}"[:500] if by else "the board runs at its full speed"
