"""Figures as bodies of messages: out of what the status page shows, and what the board says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.device.storage import Storage
from agent.device.thermal import Thermal
from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.moment import Moment
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.page.status import Memory, ModelStatus, Status

Body = dict[str, object]
_MIB = 1 << 20


class Figures(NamedTuple):
    """Bodies of one group: the component and the name that they are published under, and their schema."""

    component: str
    name: str
    schema: str
    body: Body


def component_of(model: str) -> str:
    """Where what concerns one model is published."""
    return f"model-{model}"


def of_agent(status: Status) -> list[Figures]:
    """The agent's own, and one group for each model."""
    found = [Figures("agent", "memory", "memory/1", memory(status.memory))]
    found.append(Figures("agent", "requests", "requests/1", requests(status)))
    # Where a name has several versions the first goes by it.
    models = {each.name: each for each in reversed(status.models)}
    return found + [Figures(component_of(name), "model", "model/1", model(each)) for name, each in models.items()]


def memory(of: Memory) -> Body:
    """Bytes by kind, planned and used, and what there is."""
    return {
        "total_bytes": of.total_bytes,
        "budget_bytes": of.budget_bytes,
        "planned": _by_kind((each.kind, each.nbytes) for each in of.planned),
        "used": _by_kind((each.kind, each.nbytes) for each in of.used),
        "used_by": _by_kind((each.model or "gateway", each.nbytes) for each in of.used),
        "slots_used_bytes": of.slots_used_bytes,
        "age_s": round(of.age_s, 3),
    }


def used_share(of: Memory) -> float:
    """What is used of the budget that is no page of a file, which the kernel can drop: in per cent."""
    held = sum(each.nbytes for each in of.used if each.kind != "file")
    return 100 * held / of.budget_bytes if of.budget_bytes else 0.0


def requests(status: Status) -> Body:
    """Since the start, and of the window."""
    recent = sum(status.latency.counts)
    return {
        "state": status.state,
        "why": status.why,
        "uptime_s": round(status.uptime_s, 3),
        "answered": status.answered,
        "refused": {each.reason: each.count for each in status.refusals},
        "degradation": {"level": status.degradation.level, "step": status.degradation.step},
        "window": {
            "seconds": round(status.window_s, 3),
            "answered": recent,
            "misses": status.misses,
            **_latency(status.latency.p50_s, status.latency.p99_s),
        },
    }


def miss_share(status: Status) -> float | None:
    """Deadlines missed of all requests of the window, in per cent; None of so few that it says nothing."""
    total = sum(status.latency.counts) + sum(max(each.recent, 0) for each in status.refusals)
    return 100 * status.misses / total if total >= 20 else None  # noqa: PLR2004 - one of fewer is more than 5 %


def model(of: ModelStatus) -> Body:
    """One model."""
    body: Body = {
        "model": of.name,
        "version": of.version,
        "state": of.state,
        "queue": {
            "door": of.requests.door,
            "ready": of.requests.ready,
            "running": of.requests.running,
            "slots_used": of.requests.slots_used,
            "slots": of.requests.slots,
        },
        "latency": _latency(of.latency.p50_s, of.latency.p99_s),
        "restarts": of.engine.restarts if of.engine else 0,
    }
    return {**body, "reason": of.reason} if of.reason else body


def of_board(thermal: Thermal, storage: Storage | None, now: Moment, expires_s: float) -> list[Figures]:
    """The board's. `expires_s` is when the certificate of HTTP does, in seconds since 1970; 0 without."""
    found = [Figures("device", "clock", "clock/1", {"quality": now.quality.value, "uptime_s": now.mono_ns // 10**9})]
    if thermal.zones or thermal.frequencies:
        found.append(Figures("device", "temperature", "temperature/1", temperature(thermal)))
    if storage is not None:
        found.append(Figures("device", "storage", "storage/1", of_storage(storage)))
    if expires_s:
        days = days_left(expires_s, now)
        # Without a clock nobody knows how many days are left.
        body: Body = {"expires_s": expires_s, **({"days_left": round(days, 2)} if days is not None else {})}
        found.append(Figures("agent", "certificate", "certificate/1", body))
    return found


def days_left(expires_s: float, now: Moment) -> float | None:
    """Of a certificate; None where there is none, or where the clock was never set."""
    if not expires_s or now.quality.value == "unsynced":
        return None
    return (expires_s - now.utc_ns / 1e9) / 86_400


def temperature(thermal: Thermal) -> Body:
    """Of all zones, and whether the board is slowed down."""
    body: Body = {
        "zones": [
            {"name": zone.name, "celsius": round(zone.celsius, 1), **_known(passive_c=zone.passive_c, critical_c=zone.critical_c)}
            for zone in thermal.zones
        ],
        "throttled": thermal.throttled,
        "cooling": [{"name": each.name, "state": each.state, "most": each.most} for each in thermal.cooling if each.state],
        "cores": [
            {"cores": each.cores, "mhz": each.mhz, "limit_mhz": each.limit_mhz, "most_mhz": each.most_mhz}
            for each in thermal.frequencies
        ],
    }  # fmt: skip
    return {**body, **_known(hottest_c=thermal.hottest_c, margin_c=thermal.margin_c)}


def of_storage(storage: Storage) -> Body:
    """Of the storage that the spool is on."""
    body: Body = {"free_bytes": storage.free_bytes, "total_bytes": storage.total_bytes}
    body |= _known(
        device=storage.device or None, written_bytes=storage.written_bytes, used_life_percent=storage.used_life,
        end_of_life=storage.end_of_life or None,
    )  # fmt: skip
    return body


def of_mqtt(spool: SpoolFigures, link: LinkFigures, commands: Mapping[str, int]) -> Figures:
    """What became of all messages: produced = delivered + dropped + queued, of each class."""
    classes = {
        kind: {
            "produced": counts.produced,
            "delivered": counts.delivered,
            "dropped": dict(counts.dropped),
            "queued": counts.queued,
            "bytes": spool.bytes_by_kind[kind],
        }
        for kind, counts in spool.by_kind.items()
    }
    body: Body = {
        "classes": classes,
        "storage": {
            "appended_bytes": spool.wear.bytes_appended,
            "written_bytes": spool.wear.bytes_written,
            "syncs": spool.wear.syncs,
            "amplification": round(spool.amplification, 3),
            "errors": spool.errors,
        },
        "link": {
            "protocol": link.protocol,
            "connections": link.connections,
            "failures": link.failures,
            "resent": link.resent,
            "rejected": dict(link.rejected),
            "stuck": link.stuck,
            "last_error": link.last_error[:200],
        },
        "commands": dict(commands),
    }
    return Figures("agent", "mqtt", "mqtt/1", body)


def _by_kind(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for kind, nbytes in found:
        sums[kind] = sums.get(kind, 0) + nbytes
    return sums


def _latency(p50_s: float | None, p99_s: float | None) -> Body:
    return {name: round(value, 6) for name, value in (("p50_s", p50_s), ("p99_s", p99_s)) if value is not None}


def _known(**values: object) -> Body:
    return {name: value for name, value in values.items() if value is not None}


def dropped(spool: SpoolFigures) -> int:
    """Messages that are lost, by no fault of theirs."""
    return sum(sum(counts.dropped.values()) for counts in spool.by_kind.values())


def planned_by_kind(memory_: Memory) -> Mapping[str, int]:
    """For a birth."""
    return _by_kind((each.kind, each.nbytes) for each in memory_.planned)


def models_of(models: Sequence[ModelStatus]) -> list[Body]:
    """For a birth."""
    return [
        {
            "name": each.name, "version": each.version, "state": each.state, "board": each.board,
            "scheme": each.scheme, "runtime": each.runtime,
        }
        for each in models
    ]  # fmt: skip
