"""What `GET /v2/status` says: the agent at one glance, as the page shows it. Pure but for reading what is there.

Additions are no break: whoever reads it passes over fields that are new to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.errors import TABLE, Reason
from agent.page.memory import Measured, planned
from agent.page.recent import Counted, quantile
from agent.refusals import Refusal
from agent.served import Entry, Served
from agent.telemetry import BUCKETS_S
from targets.recipe import Recipe

Count = Annotated[int, Meta(ge=0)]
State = Literal["serving", "degraded", "not_ready", "empty", "stopping"]


class Engine(msgspec.Struct, frozen=True):
    """The engine process of a model: whether it can run requests, and how often one was started after the first."""

    up: bool
    restarts: Count


class Requests(msgspec.Struct, frozen=True):
    """Requests on their way: at the door (of `room`), in slots (of `slots`), of those ready to run, and running."""

    door: Count
    room: Count
    slots_used: Count
    slots: Count
    ready: Count
    running: Count


class Latency(msgspec.Struct, frozen=True):
    """Of answered requests in the window, head to end: `counts[i]` took at most `bounds_s[i]`, but more than the bound
    before; the last has no bound. Quantiles are estimates within a bucket, null where there were no requests."""

    bounds_s: list[float]
    counts: list[Count]
    p50_s: float | None
    p99_s: float | None


class ModelStatus(msgspec.Struct, frozen=True):
    """A model: `state` as in the repository index, and `reason` where it is not ready. `board`, `scheme` and `runtime`
    are what the bundle was compiled for. `results`: whether what it answers may be followed, and `picture`: whether the
    newest image that it answered may be seen; then boxes are of the image turned upright where `upright`."""

    name: str
    version: str
    state: str
    reason: str
    board: str
    scheme: str
    runtime: str
    engine: Engine | None
    requests: Requests
    latency: Latency
    results: bool
    picture: bool
    upright: bool


class Planned(msgspec.Struct, frozen=True):
    """A part of the plans of all that run."""

    part: str
    kind: str
    nbytes: Count


class Used(msgspec.Struct, frozen=True):
    """What the gateway (`model` is empty) or the engine of a model uses of one kind of memory (PSS)."""

    model: str
    kind: str
    nbytes: Count


class Memory(msgspec.Struct, frozen=True):
    """`budget_bytes` is what this machine has for the agent; the rest of `total_bytes` is the system's reserve.
    `used` was measured `age_s` ago. `slots_used_bytes` is what requests have of the planned slots."""

    total_bytes: Count
    budget_bytes: Count
    planned: list[Planned]
    used: list[Used]
    age_s: float
    slots_used_bytes: Count


class RefusedFor(msgspec.Struct, frozen=True):
    """How often requests were refused for a reason: since the start, and in the window."""

    reason: str
    status: int
    meaning: str
    count: Count
    recent: Count


class LastRefusal(msgspec.Struct, frozen=True):
    """`count` refusals of a model with one reason that followed each other closely, with the message of the last.
    Times are in seconds after the epoch; `model` is empty where there is none of the name that was asked for."""

    model: str
    reason: str
    status: int
    message: str
    first_s: float
    last_s: float
    count: Count


class Degraded(msgspec.Struct, frozen=True):
    """The level of degradation, 0 (normal) to 3, what it is called, and what pressed when it was raised."""

    level: Annotated[int, Meta(ge=0, le=3)]
    step: str
    cause: str


class Status(msgspec.Struct, frozen=True):
    """`epoch` is another at every start of the agent, `started_s` when that was and `at_s` now (seconds after the
    epoch of Unix). What is recent is of the last `window_s` seconds; `misses` are deadlines missed."""

    name: str
    version: str
    epoch: str
    state: State
    why: str
    started_s: float
    at_s: float
    uptime_s: float
    degradation: Degraded
    models: list[ModelStatus]
    memory: Memory
    window_s: float
    latency: Latency
    answered: Count
    misses: Count
    refusals: list[RefusedFor]
    last_refusals: list[LastRefusal]


def latency_of(counts: Sequence[int]) -> Latency:
    """A histogram with what is read off it."""
    return Latency(list(BUCKETS_S), list(counts), quantile(BUCKETS_S, counts, 0.5), quantile(BUCKETS_S, counts, 0.99))


def summed(counts: Iterable[Sequence[int]]) -> list[int]:
    """Histograms of all models as one."""
    return [sum(each) for each in zip(*counts, strict=True)] or [0] * (len(BUCKETS_S) + 1)


def state_of(entries: Sequence[Entry], draining: bool, level: int, step: str) -> tuple[State, str]:
    """(how the agent does, why where it is not well)."""
    if draining:
        return "stopping", "what was accepted is answered, nothing new is taken"
    missing = [entry.name for entry in entries if entry.wanted and not entry.ready]
    if missing:
        return "not_ready", f"not every model can be asked: {', '.join(missing)}"
    if not any(entry.active for entry in entries):
        return "empty", "no model is loaded"
    return ("degraded", step) if level else ("serving", "")


def model_of(entry: Entry, queue: tuple[int, int], recent: Counted) -> ModelStatus:
    """One model; `queue` is what of it is (ready, running)."""
    served = entry.active
    pool = served.pool if served else None
    ready, running = queue
    manifest = served.model.manifest if served else None
    options = entry.options
    return ModelStatus(
        name=entry.name,
        version=entry.version,
        state=entry.state,
        reason=entry.reason,
        board=manifest.target if manifest else "",
        scheme=manifest.quantization.scheme if manifest else "",
        runtime=manifest.runtime if manifest else "",
        engine=Engine(bool(served.engine.up), served.engine.restarts) if served else None,
        requests=Requests(
            door=len(entry.door), room=entry.room, slots_used=pool.leased if pool else 0,
            slots=pool.slots if pool else 0, ready=ready, running=running,
        ),
        latency=latency_of(recent.answered.get(entry.name) or summed([])),
        results=options.results_bytes > 0,
        picture=options.picture_bytes > 0,
        upright=_is_upright(manifest.recipe if manifest else None),
    )  # fmt: skip


def memory_of(served: Sequence[Served], measured: Measured, now: float, total: int, budget: int) -> Memory:
    """The plans of all that run, and what is used."""
    terms = [term for each in served for term in each.model.manifest.plan.phase("run").terms]
    kept = sum(each.options.kept_bytes for each in served)
    return Memory(
        total_bytes=total,
        budget_bytes=budget,
        planned=[Planned(part, kind, nbytes) for (part, kind), nbytes in planned(terms, kept).items()],
        used=[Used(*each) for each in measured.used],
        age_s=max(now - measured.at, 0.0),
        slots_used_bytes=sum(each.pool.leased * each.slab.layout.slot_bytes for each in served),
    )


def refused_for(counted: Counted, recent: Counted) -> list[RefusedFor]:
    """Reasons for which anything was refused, the most frequent lately first."""
    found = [
        RefusedFor(
            reason.value, TABLE[reason].status, TABLE[reason].meaning, count, max(recent.refused.get(reason, 0), 0)
        )
        for reason, count in counted.refused.items()
        if count
    ]
    return sorted(found, key=lambda each: (-each.recent, -each.count, each.reason))


def last_refusal(refusal: Refusal) -> LastRefusal:
    """As it is shown."""
    status = TABLE[refusal.reason].status
    return LastRefusal(
        refusal.model, refusal.reason.value, status, refusal.message, refusal.first_s, refusal.last_s, refusal.count
    )


def misses_in(recent: Counted) -> int:
    """Deadlines missed."""
    return recent.refused.get(Reason.DEADLINE, 0)


def _is_upright(recipe: Recipe | None) -> bool:
    return recipe is None or recipe.decode.orientation == "exif"
