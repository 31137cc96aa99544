"""Figures as bodies of messages: out of what the status page shows, and what the board says (docs/mqtt.md). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.device.storage import Storage
from agent.device.thermal import Thermal
from agent.journal import Happening
from agent.mqtt.alarms import Alarm
from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.moment import Moment
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.page.status import Latency, Memory, ModelStatus, Status

Body = dict[str, object]
AGENT, DEVICE = "agent", "device"
# Of fewer requests one that came too late would be more than 5 %.
_FEW = 20
_MOST_ZONES = 64


class Figures(NamedTuple):
    """Bodies of one group: the component and the name that they are published under, which is that of the schema."""

    component: str
    name: str
    body: Body


def component_of(model: str) -> str:
    """Where what concerns one model is published."""
    return f"model-{model}"


def of_agent(status: Status) -> list[Figures]:
    """The agent's own, and one group for each model."""
    misses: Body = {"deadline_misses": status.misses, "window_s": round(status.window_s, 1)}
    found = [
        Figures(AGENT, "memory", memory(status.memory)),
        Figures(AGENT, "latency", {"model": "*", "total": total(status.latency), **misses}),
    ]
    # Where a name has several versions the first goes by it.
    models = {each.name: each for each in reversed(status.models)}
    return found + [Figures(component_of(name), "latency", model(each, status)) for name, each in models.items()]


def memory(of: Memory) -> Body:
    """Bytes by kind, measured and planned, and what there is for the agent."""
    used, planned = _sums((each.kind, each.nbytes) for each in of.used), plan_of(of)
    body: Body = {f"{kind}_bytes": used.get(kind, 0) for kind in ("anonymous", "file", "shared")}
    body |= {f"plan_{kind}_bytes": planned.get(kind, 0) for kind in ("anonymous", "file", "shared")}
    return {
        **body,
        "limit_bytes": of.budget_bytes,
        "total_bytes": of.total_bytes,
        "slots_used_bytes": of.slots_used_bytes,
        "processes": _sums((each.model or "gateway", each.nbytes) for each in of.used),
        "age_s": round(of.age_s, 3),
    }


def plan_of(of: Memory) -> dict[str, int]:
    """What all plans together count, by kind."""
    return _sums((_KIND.get(each.kind, each.kind), each.nbytes) for each in of.planned)


_KIND = {"file-backed": "file"}


def used_share(of: Memory) -> float:
    """What is used of the budget and is no page of a file, which the kernel can drop: in per cent."""
    held = sum(each.nbytes for each in of.used if each.kind != "file")
    return 100 * held / of.budget_bytes if of.budget_bytes else 0.0


def miss_share(status: Status) -> float | None:
    """Deadlines missed of all requests of the window, in per cent; None of so few that it says nothing."""
    asked = sum(status.latency.counts) + sum(max(each.recent, 0) for each in status.refusals)
    return 100 * status.misses / asked if asked >= _FEW else None


def total(of: Latency) -> Body:
    """From head to end, of answered requests of the window."""
    found = {"p50_ms": of.p50_s, "p99_ms": of.p99_s}
    return {"count": sum(of.counts), **{name: round(each * 1e3, 3) for name, each in found.items() if each is not None}}


def model(of: ModelStatus, status: Status) -> Body:
    """One model."""
    return {
        "model": of.name,
        "version": of.version,
        "state": of.state,
        **({"reason": of.reason[:500]} if of.reason else {}),
        "total": total(of.latency),
        "window_s": round(status.window_s, 1),
        "waiting": of.requests.door + of.requests.ready,
        "running": of.requests.running,
        "slots_used": of.requests.slots_used,
        "slots": of.requests.slots,
        "engine_restarts": of.engine.restarts if of.engine else 0,
    }


def queue(status: Status, spool: SpoolFigures, link: LinkFigures, commands: Mapping[str, int]) -> Figures:
    """What waits in the agent and in the log, and what became of all: produced = delivered + dropped + queued."""
    body: Body = {
        "state": status.state,
        "waiting": sum(each.requests.door + each.requests.ready for each in status.models),
        "running": sum(each.requests.running for each in status.models),
        "answered": status.answered,
        "refused": {each.reason: each.count for each in status.refusals},
        "degradation": status.degradation.level,
        "uptime_s": round(status.uptime_s, 1),
        "spool": {
            kind: {
                "produced": counts.produced, "delivered": counts.delivered, "queued": counts.queued,
                "dropped": dict(counts.dropped), "bytes": spool.bytes_by_kind[kind],
            }
            for kind, counts in spool.by_kind.items()
        },
        "storage": {
            "appended_bytes": spool.wear.bytes_appended,
            "written_bytes": spool.wear.bytes_written,
            "syncs": spool.wear.syncs,
            "amplification": round(spool.amplification, 3),
            "errors": spool.errors,
        },
        "link": {
            "protocol": link.protocol, "connections": link.connections, "failures": link.failures,
            "resent": link.resent, "rejected": dict(link.rejected), "stuck": link.stuck,
        },
        "commands": dict(commands),
    }  # fmt: skip
    return Figures(AGENT, "queue", body)


class Days(NamedTuple):
    """Left to the certificate that HTTP is served with, and to the one that is shown to brokers; None without."""

    http: float | None
    broker: float | None

    @property
    def least(self) -> float | None:
        return min((each for each in self if each is not None), default=None)


def board(thermal: Thermal, storage: Storage | None, now: Moment, days: Days) -> Figures:
    """The board."""
    names: dict[str, int] = {}
    zones: dict[str, float] = {}
    for zone in thermal.zones[:_MOST_ZONES]:
        names[zone.name] = count = names.get(zone.name, 0) + 1
        zones[zone.name if count == 1 else f"{zone.name}-{count}"] = round(zone.celsius, 1)
    body: Body = {
        "temperatures_c": zones,
        "throttled": thermal.throttled,
        "throttling": throttling(thermal),
        "clock_quality": now.quality.value,
        "uptime_s": now.mono_ns // 10**9,
        "cores_mhz": {each.cores: round(each.mhz) for each in thermal.frequencies},
        **_known(hottest_c=thermal.hottest_c, margin_c=thermal.margin_c),
    }
    left = {"certificate_days_left": days.http, "broker_certificate_days_left": days.broker}
    body |= {name: round(each, 2) for name, each in left.items() if each is not None}
    if storage is not None:
        body |= {"storage_free_bytes": storage.free_bytes, "storage_total_bytes": storage.total_bytes}
        body |= _known(
            storage_device=storage.device or None,
            storage_written_bytes=storage.written_bytes,
            storage_wear=None if storage.used_life is None else storage.used_life / 100,
            storage_end_of_life=storage.end_of_life or None,
        )
    return Figures(DEVICE, "device", body)


def throttling(thermal: Thermal) -> list[str]:
    """What takes speed away now."""
    by = [f"{each.name} at {each.state} of {each.most}" for each in thermal.cooling if each.slows]
    return by + [
        f"cores {each.cores} at most {each.limit_mhz:g} of {each.most_mhz:g} MHz"
        for each in thermal.frequencies
        if each.limit_mhz < each.most_mhz
    ]


def days_left(expires_s: float, now: Moment) -> float | None:
    """Of a certificate that expires then, in seconds since 1970, as far as this clock is right; None where there is
    none (0)."""
    return (expires_s - now.utc_ns / 1e9) / 86_400 if expires_s else None


def event(number: int, happening: Happening) -> tuple[str, Body]:
    """(its name, the body) of something that happened."""
    fields = msgspec.to_builtins(happening)
    name = fields.pop("type")
    body: Body = {"event": name, "number": number}
    body |= {key: fields.pop(key) for key in ("model", "version") if key in fields}
    details = {key: value for key, value in fields.items() if key not in ("seq", "at") and value is not None}
    return name, {**body, "details": details} if details else body


def alarm(of: Alarm) -> Body:
    """One that is raised, or cleared."""
    body: Body = {"name": of.name, "raised": of.raised, "text": of.text, "stood_s": round(of.stood_s, 3)}
    return body | _known(value=of.value, limit=of.limit, unit=of.unit or None)


def models(of: Sequence[ModelStatus]) -> list[Body]:
    """For a birth."""
    return [
        {
            "name": each.name, "version": each.version, "state": each.state, "scheme": each.scheme,
            "runtime": each.runtime,
        }
        for each in of
    ]  # fmt: skip


# What the figures are, for who reads them for the first time: title, and unit and meaning of each.
META: dict[tuple[str, str], tuple[str, dict[str, tuple[str, str]]]] = {
    (AGENT, "memory"): (
        "Memory of the agent and its engines, beside what their plans count",
        {
            "anonymous_bytes": ("B", "measured, private to the processes"),
            "file_bytes": ("B", "measured, pages of files"),
            "shared_bytes": ("B", "measured, shared between gateway and engines"),
            "plan_anonymous_bytes": ("B", "planned"),
            "plan_file_bytes": ("B", "planned"),
            "plan_shared_bytes": ("B", "planned"),
            "limit_bytes": ("B", "what this machine has for the agent"),
        },
    ),
    (AGENT, "latency"): (
        "All models together, of the last minutes",
        {"total": ("ms", "from head to end"), "deadline_misses": ("1", "requests that were too late")},
    ),
    (AGENT, "queue"): (
        "What waits in the agent and in the log of messages",
        {"waiting": ("1", "requests"), "running": ("1", "requests"), "spool": ("1", "messages by class")},
    ),
    (DEVICE, "device"): (
        "The board",
        {
            "temperatures_c": ("Cel", "by sensor"),
            "throttled": ("1", "whether speed is taken away now"),
            "storage_wear": ("1", "part of its life that the storage has used"),
            "storage_written_bytes": ("B", "since the boot"),
            "certificate_days_left": ("d", "of the certificate that HTTP is served with"),
            "broker_certificate_days_left": ("d", "of the certificate that is shown to brokers"),
        },
    ),
}


def meta(key: tuple[str, str], period_s: float) -> Body:
    """The body of `meta/1` of one of `META`."""
    title, fields = META[key]
    return {
        "title": title,
        "schema": f"{key[1]}/1",
        "period_s": period_s,
        "fields": {name: {"unit": unit, "text": text} for name, (unit, text) in fields.items()},
    }


def _sums(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, nbytes in found:
        sums[name] = sums.get(name, 0) + nbytes
    return sums


def _known(**values: object) -> Body:
    return {name: value for name, value in values.items() if value is not None}
