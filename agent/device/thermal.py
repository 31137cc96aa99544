"""Temperatures, and whether the kernel slows the board down for them, from sysfs. Nothing here writes.

Sources: Linux `Documentation/driver-api/thermal/sysfs-api.rst` (thermal_zone, cooling_device; millidegrees Celsius) and
`Documentation/admin-guide/pm/cpufreq.rst` (scaling_cur_freq, cpuinfo_max_freq; kHz).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
# A sensor that is not connected reads as one of these, or far outside of what silicon survives.
_LEAST_C, _MOST_C = -60.0, 200.0
# Trip points that say something of heat, not of fans ("active"); the lowest of a type counts.
_TRIPS = ("passive", "hot", "critical")


class Zone(NamedTuple):
    """A sensor: what it is called, what it reads, and where the kernel begins to slow down, and to switch off."""

    name: str
    celsius: float
    passive_c: float | None = None
    critical_c: float | None = None


class Cooling(NamedTuple):
    """What the kernel cools with: `state` of `most`; a processor that cools is one that is slowed down."""

    name: str
    state: int
    most: int

    @property
    def slows(self) -> bool:
        """Whether it takes speed away now. A fan that turns does not."""
        return self.state > 0 and "fan" not in self.name.lower()


class Frequency(NamedTuple):
    """Of one group of cores, in MHz; `limit` is what it may have now, `most` what it could."""

    cores: str
    mhz: float
    limit_mhz: float
    most_mhz: float


class Thermal(NamedTuple):
    """How hot the board is; all are empty where the kernel says nothing."""

    zones: tuple[Zone, ...]
    cooling: tuple[Cooling, ...]
    frequencies: tuple[Frequency, ...]

    @property
    def hottest_c(self) -> float | None:
        """The highest reading."""
        return max((zone.celsius for zone in self.zones), default=None)

    @property
    def margin_c(self) -> float | None:
        """How far the zone that is nearest to it is from being slowed down (or switched off, where that is all that is
        known); None where nobody says."""
        limits = [(zone.passive_c or zone.critical_c, zone.celsius) for zone in self.zones]
        return min((limit - celsius for limit, celsius in limits if limit), default=None)

    @property
    def throttled(self) -> bool:
        """Whether speed is taken away now: by a cooling device, or by a limit below what the cores can do."""
        limited = any(each.limit_mhz < each.most_mhz for each in self.frequencies)
        return limited or any(each.slows for each in self.cooling)


def read_thermal(root: Path = ROOT) -> Thermal:
    """All that the kernel says; what cannot be read is left out. `root` is where sysfs is mounted below."""
    thermal = root / "sys/class/thermal"
    zones = [_zone(folder) for folder in sorted(thermal.glob("thermal_zone*"), key=_number)]
    cooling = [_cooling(folder) for folder in sorted(thermal.glob("cooling_device*"), key=_number)]
    policies = (root / "sys/devices/system/cpu/cpufreq").glob("policy*")
    frequencies = [_frequency(folder) for folder in sorted(policies, key=_number)]
    return Thermal(
        tuple(each for each in zones if each),
        tuple(each for each in cooling if each),
        tuple(each for each in frequencies if each),
    )


def _zone(folder: Path) -> Zone | None:
    milli = _integer(folder / "temp")
    if milli is None or not _LEAST_C <= milli / 1000 <= _MOST_C:
        return None
    trips: dict[str, float] = {}
    for path in folder.glob("trip_point_*_type"):
        kind, at = _text(path), _integer(path.with_name(path.name.replace("_type", "_temp")))
        if kind in _TRIPS and at is not None and at > 0:
            trips[kind] = min(at / 1000, trips.get(kind, _MOST_C))
    passive = trips.get("passive", trips.get("hot"))
    return Zone(_text(folder / "type") or folder.name, milli / 1000, passive, trips.get("critical"))


def _cooling(folder: Path) -> Cooling | None:
    state, most = _integer(folder / "cur_state"), _integer(folder / "max_state")
    if state is None or most is None:
        return None
    return Cooling(_text(folder / "type") or folder.name, state, most)


def _frequency(folder: Path) -> Frequency | None:
    now, limit, most = (
        _integer(folder / name) for name in ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq")
    )
    if now is None or most is None:
        return None
    return Frequency(
        _text(folder / "affected_cpus"), now / 1000, (most if limit is None else limit) / 1000, most / 1000
    )


def _number(path: Path) -> int:
    digits = path.name.lstrip("abcdefghijklmnopqrstuvwxyz_")
    return int(digits) if digits.isdigit() else 0


def _text(path: Path) -> str:
    try:
        # A driver's name is ASCII; whatever else one says is no reason to know nothing of the others.
        return path.read_text(encoding="ascii", errors="replace").strip()[:64]
    except OSError:
        return ""


def _integer(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
