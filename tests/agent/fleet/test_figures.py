"""Figures as bodies of messages."""

from __future__ import annotations

from agent.device.storage import Storage
from agent.device.thermal import Cooling, Frequency, Thermal, Zone
from agent.errors import Reason
from agent.fleet import figures
from agent.fleet.figures import Days
from agent.journal import Activate, EngineDown
from agent.mqtt.moment import Moment, Quality
from agent.page.status import Latency, Memory, Planned, RefusedFor, Status, Used, latency_of
from agent.telemetry import BUCKETS_S

NOW = Moment(7_000_000_000, "boot", 1_800_000_000 * 10**9, Quality.NTP)
MEMORY = Memory(
    4000, 1000,
    [Planned("weights", "anonymous", 300), Planned("slots", "anonymous", 100), Planned("weights", "file", 50)],
    [Used("", "anonymous", 200), Used("add", "anonymous", 250), Used("add", "shared", 150), Used("add", "file", 900)],
    1.0, 64,
)  # fmt: skip


def status(answered: int, late: int) -> Status:
    counts = [0] * (len(BUCKETS_S) + 1)
    counts[0] = answered
    latency: Latency = latency_of(counts)
    refused = [RefusedFor(Reason.DEADLINE.value, 504, "", late, late)]
    return Status(
        "a", "v", "e", "serving", "", 0.0, 0.0, 10.0, None, [], MEMORY, 300.0, latency, answered, late, refused, [],  # type: ignore[arg-type]
    )  # fmt: skip


def test_memory_is_measured_beside_planned() -> None:
    body = figures.memory(MEMORY)
    assert (body["anonymous_bytes"], body["file_bytes"], body["shared_bytes"]) == (450, 900, 150)
    assert (body["plan_anonymous_bytes"], body["plan_file_bytes"], body["plan_shared_bytes"]) == (400, 50, 0)
    assert body["processes"] == {"gateway": 200, "add": 1300}
    # Pages of files can be dropped, and are not what a machine runs out of.
    assert figures.used_share(MEMORY) == 60.0


def test_misses_of_few_requests_say_nothing() -> None:
    assert figures.miss_share(status(18, 1)) is None
    assert figures.miss_share(status(15, 5)) == 25.0


def test_a_board_with_two_sensors_of_one_name() -> None:
    zones = (Zone("acpitz", 40.0), Zone("acpitz", 50.04, 90.0), Zone("cpu", 45.0))
    thermal = Thermal(zones, (Cooling("cpufreq-cpu0", 2, 5),), (Frequency("0 1", 1000.0, 1500.0, 2000.0),))
    storage = Storage(10, 20, "mmcblk0", 512, 30, "normal")
    body = figures.board(thermal, storage, NOW, Days(None, 3.14159)).body
    assert body["temperatures_c"] == {"acpitz": 40.0, "acpitz-2": 50.0, "cpu": 45.0}
    assert body["throttled"] is True
    assert body["throttling"] == ["cpufreq-cpu0 at 2 of 5", "cores 0 1 at most 1500 of 2000 MHz"]
    assert (body["storage_wear"], body["broker_certificate_days_left"]) == (0.3, 3.14)
    assert "certificate_days_left" not in body


def test_a_board_that_says_nothing() -> None:
    body = figures.board(Thermal((), (), ()), None, NOW, Days(None, None)).body
    assert body == {
        "temperatures_c": {}, "throttled": False, "throttling": [], "clock_quality": "ntp", "uptime_s": 7,
        "cores_mhz": {},
    }  # fmt: skip


def test_days_left() -> None:
    assert figures.days_left(0, NOW) is None
    assert figures.days_left(1_800_000_000 + 86_400, NOW) == 1.0
    assert Days(5.0, 2.0).least == 2.0
    assert Days(None, None).least is None


def test_events() -> None:
    assert figures.event(3, Activate(model="m", version="2", before="1", at="now")) == (
        "activate", {"event": "activate", "number": 3, "model": "m", "version": "2", "details": {"before": "1"}},
    )  # fmt: skip
    name, body = figures.event(4, EngineDown(model="m", version="2", how="died", starts_again=False))
    assert (name, body["details"]) == ("engine_down", {"how": "died", "starts_again": False})


def test_what_figures_are_is_told_of_figures_that_there_are() -> None:
    body = figures.memory(MEMORY)
    assert set(figures.META["agent", "memory"][1]) <= body.keys()
    assert figures.meta(("agent", "memory"), 30.0)["schema"] == "memory/1"
