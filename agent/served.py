"""A model as it is served: `Entry` is what clients ask for by name, `Served` one version of it in an engine of its own.

Theory of operation. An entry outlives the versions that it shows. Who has a slot holds it in a version's slab, and has
its answer from that version, whatever is active by then; who waits has nothing yet, and waits at the entry's door:

    entry "rec" --door: calls without a slot--> active: version 3fa9 (engine, slab, slots)
                                                        version 81c2, retired: ends when its last slot is given back

So nobody who waits notices that versions change, and nobody who runs is disturbed by it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from agent.cached import Cached
from agent.calls import Call
from agent.config import Config, ModelOptions, Requests
from agent.engine.channel import Done, Load, Passed, Ready, RunError, Slab, most_runs
from agent.engine.supervisor import Backoff, Supervisor
from agent.errors import Reason, RefusedError
from agent.generation.tokenizer import Text
from agent.images import Images
from agent.limits.breaker import Breaker
from agent.models import Model
from agent.pool import Pool
from agent.request import Request
from agent.scheduling.batch import Limits
from agent.scheduling.door import Door
from agent.statistics import Statistics
from targets.bundle import Residency

_numbers = itertools.count(1)


class Events(Protocol):
    """What the gateway wants to hear of an engine."""

    def on_reply(self, served: Served, reply: Passed | Done | RunError) -> None: ...

    def on_death(self, served: Served, how: str, again: bool) -> None: ...

    def on_ready(self, served: Served, ready: Ready) -> None: ...


class Served:
    """One version of a model: its bundle, its engine, its slab and the leases on it.

    `key` is what the scheduler knows it by; no two have the same, not even of one bundle.
    """

    def __init__(
        self, entry: Entry, options: ModelOptions, model: Model, images: Images | None, config: Config, events: Events,
        text: Text | None = None,
    ) -> None:  # fmt: skip
        """Reserves the slab. Raises AgentError when there is no memory for it."""
        self.entry, self.options, self.model, self.images, self.text = entry, options, model, images, text
        self.version = model.version
        self.key = f"{entry.name}:{model.version}:{next(_numbers)}"
        self.statistics = Statistics()
        self.pool = Pool(model.layout.slots)
        self.limits = _limits(model, options.weight)
        self._batched = model.contract.batch_rows > 0
        self._sorted = self._batched or bool(model.contract.states)
        """Whether requests of different shapes can be alike."""
        self.cached: Cached | None = None
        """Its answers, where some are kept."""
        self.breaker = Breaker(config.limits.breaker_failures, config.limits.breaker_s)
        self.filling: set[int] = set()
        """Calls that hold a slot which is not ready yet: requests that come."""
        self._emptied = asyncio.Event()
        self._config = config
        self.engine = Supervisor(
            model.layout,
            Backoff(config.engine.restarts, config.engine.restart_window_s),
            config.engine.hang_s,
            lambda reply: events.on_reply(self, reply),
            lambda how, again: events.on_death(self, how, again),
            lambda ready: events.on_ready(self, ready),
            config.engine.inline,
        )
        if options.cache_bytes:
            self.cached = Cached(model.digest, self.engine.slab, options.cache_bytes)

    @property
    def name(self) -> str:
        return self.entry.name

    def request(
        self, call: Call, slot: int, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> Request:  # fmt: skip
        """What the scheduler is to run for the call."""
        alike = self.model.contract.alike(shapes) if self._sorted else shapes
        return Request(
            call.id, call.deadline, slot, shapes, nbytes, outputs, self.key, call.client, call.priority,
            shapes[0][0] if self._batched else 1, (alike, outputs), call.arrived,
        )  # fmt: skip

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Names of the classes of its outputs, by theirs, where its recipe has them."""
        return self.images.labels if self.images else {}

    @property
    def slab(self) -> Slab:
        return self.engine.slab

    async def start(self, quiet: Callable[[], bool]) -> Ready:
        """Start the engine and load the bundle. Raises AgentError with the engine's reason.

        `quiet` says, before each start, whether others compute meanwhile and are not to be disturbed.
        """

        def load() -> Load:
            return Load(
                str(self.model.folder),
                self.model.digest,
                self._config.engine.intra_op_threads,
                self._config.log.level,
                self._config.log.format,
                tuple(residency.value for residency in self.model.residencies),
                str(self.model.finalised or ""),
                quiet(),
                sample_slot=0,
            )

        return await self.engine.start(load, self._config.engine.load_s)

    def is_same(self, model: Model, options: ModelOptions) -> bool:
        """Whether it is that very model, served as it should be, and not given up."""
        there = (self.model.digest, self.model.residencies, _settings(self.options))
        wanted = (model.digest, model.residencies, _settings(options))
        return not self.engine.given_up and there == wanted

    def lease(self, call: Call) -> bool:
        """Give the call a slot, if one is free."""
        slot = self.pool.lease(call.id)
        if slot is None:
            return False
        call.served, call.slot, call.statistics = self, slot, self.statistics
        call.seated = time.monotonic()
        self.filling.add(call.id)
        return True

    def release(self, slot: int, owner: int) -> None:
        """Take a slot back."""
        self.pool.release(slot, owner)
        if not self.pool.leased:
            self._emptied.set()

    async def empty(self) -> None:
        """Wait until no slot is leased."""
        # Whoever waits at the door may have had the last slot that was given back before this runs again.
        while self.pool.leased:
            self._emptied.clear()
            await self._emptied.wait()

    async def close(self) -> None:
        """End the engine; its memory is free when this returns."""
        await self.engine.close()
        if self.images:
            self.images.thread.shutdown(wait=False)


def _settings(options: ModelOptions) -> tuple[float, int, int, int]:
    """What takes effect when a model is loaded."""
    return options.weight, options.cache_mib, options.results_mib, options.picture_kib


def _limits(model: Model, weight: float) -> Limits:
    """What the scheduler may do with it: whoever holds a slot may queue, and the pool is the bound."""
    slots = model.layout.slots
    return Limits(slots, slots, max(model.contract.batch_rows, 1), _runs_per_pass(model), weight)


def _runs_per_pass(model: Model) -> int:
    """All slots where weights are streamed and the plan has room for what waits; else sharing would win nothing."""
    if model.manifest.plan.sweep is None or Residency.STREAMED not in model.residencies:
        return 1
    return min(model.layout.slots, most_runs(model.contract))


class Entry:
    """A model that clients ask for by name.

    `active` is the version that takes requests. While there is none and `coming` is set they wait at the door for the
    next; else they are refused, with `reason`. The agent is not ready without those that are `wanted`.
    """

    def __init__(self, name: str, options: ModelOptions, requests: Requests, configured: bool = True) -> None:
        self.name, self.options, self.configured = name, options, configured
        self._requests = requests
        self.door: Door[Call] = Door(*self._bounds())
        self.active: Served | None = None
        self.coming = False
        self.closing = False
        self.wanted = configured
        self.reason = ""

    def use(self, options: ModelOptions) -> None:
        """From now on these: what comes is bounded and ordered by them."""
        self.options = options
        self.door.resize(*self._bounds())

    def _bounds(self) -> tuple[int, int]:
        """How many may wait, and how many of one client. Without a bound for one it is the queue that is full."""
        length = self.options.queue_length or self._requests.queue_length
        return length, self.options.client_queue_length or self._requests.client_queue_length or length + 1

    @property
    def fullness(self) -> float:
        """How much of the door's room is taken, 0..1; more, where it had more room before."""
        return len(self.door) / self.room

    @property
    def room(self) -> int:
        """How many may wait at the door."""
        return self._bounds()[0]

    @property
    def version(self) -> str:
        """Of what is active; empty when nothing is."""
        return self.active.version if self.active else ""

    @property
    def ready(self) -> bool:
        """Whether a request that comes now can be run."""
        return self.active is not None and self.active.engine.up and not self.closing

    @property
    def state(self) -> str:
        """As Triton's repository index has it."""
        if self.closing:
            return "UNLOADING"
        if self.ready:
            return "READY"
        loads = self.coming or (self.active is not None and not self.active.engine.given_up)
        return "LOADING" if loads else "UNAVAILABLE"

    def check(self) -> None:
        """Raise RefusedError when it takes no requests now, not even to wait."""
        if self.closing:
            raise RefusedError(Reason.MODEL_UNLOADING, f"model {self.name!r} is being unloaded")
        if self.active is None and not self.coming:
            why = f": {self.reason}" if self.reason else ""
            raise RefusedError(Reason.MODEL_NOT_READY, f"model {self.name!r} is not loaded{why}")
        if self.active is not None and not self.active.engine.up:
            gone = self.active.engine.given_up
            raise RefusedError(
                Reason.ENGINE_DOWN,
                self.reason if gone else "the engine process is being started",
                "" if gone else "try again",
            )
