"""From an admitted call to its answer: the one place where pool, scheduler and engine meet.

Theory of operation. A call goes through these stages and is settled exactly once, from whichever it is in:

    opened --> at the door --> admitted --> queued --> running --> settled
               (no slot yet)   (holds a slot: its body is read and decoded into it)

A slot is leased before the body is read, so that the tensors in memory are those that the plan counted; who waits at
the door costs a connection. One timer keeps every deadline. A call that is settled while its run goes on (deadline,
client gone) leaves its slot to the engine, and the slot is free again when the engine has answered, not before.

The engine makes one pass at a time. Where weights are streamed, a pass costs the reading of them, and all requests that
are queued when it begins share it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

from agent import log
from agent.config import Config
from agent.engine.channel import Done, Load, Pass, Passed, Ready, Run, RunError, Slab, most_runs
from agent.engine.supervisor import Backoff, Supervisor
from agent.errors import Reason, RefusedError
from agent.models import Model
from agent.pool import Pool
from agent.request import Output, Refused, Request, Result
from agent.scheduler import EXPIRED, Gathering, Scheduler
from agent.telemetry import Telemetry
from targets.bundle import Residency

_FAULTS = frozenset({Reason.FAULT, Reason.ENGINE_ERROR, Reason.OUTPUT_TOO_LARGE})


@dataclass(eq=False)
class Call:
    """One request on its way; `answer` is what its handler awaits now."""

    id: int
    arrived: float
    deadline: float
    slot: int | None = None
    answer: asyncio.Future[Any] | None = None


class Gateway:
    """Serves one model through one engine process."""

    def __init__(self, config: Config, model: Model, telemetry: Telemetry) -> None:
        self.model = model
        self.telemetry = telemetry
        self.draining = False
        self._config = config
        self._log = log.get("gateway")
        self._loop = asyncio.get_running_loop()
        self._pool = Pool(model.layout.slots)
        self._door: Scheduler[Call] = Scheduler(config.requests.queue_length)
        # Whoever holds a slot may queue: the pool is the bound.
        self._queue: Scheduler[Request] = Scheduler(model.layout.slots)
        self._calls: dict[int, Call] = {}
        # Slots that are leased and not ready: requests that come.
        self._filling: set[int] = set()
        self._running: dict[int, Request] = {}
        self._together = _requests_per_pass(model)
        self._gathering = Gathering(self._together)
        self._ids = itertools.count(1)
        # uvloop's own clock is cached and ticks in milliseconds, so all times are of time.monotonic().
        self._timer: asyncio.TimerHandle | None = None
        self._wakeup = 0.0
        options = config.engine
        self._engine = Supervisor(
            model.layout,
            Backoff(options.restarts, options.restart_window_s),
            options.hang_s,
            self._on_reply,
            self._on_death,
            self._on_ready,
        )
        self.given_up = asyncio.Event()
        """Set when the engine died too often to be started once more."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch()

    def _watch(self) -> None:
        watch = self.telemetry.watch
        watch("tightfit_engine_up", "1 while the engine can run requests.", lambda: float(self._engine.up))
        watch("tightfit_engine_restarts", "Engines started after the first.", lambda: float(self._engine.restarts))
        watch("tightfit_in_flight", "Requests that hold a slot.", lambda: float(self._pool.leased))
        watch("tightfit_slots", "Requests that can be in memory at once.", lambda: float(self._pool.slots))
        watch("tightfit_queue_depth", "Requests ready to run.", lambda: float(len(self._queue)))
        watch("tightfit_running", "Requests in the pass that goes on.", lambda: float(len(self._running)))
        watch("tightfit_door_depth", "Requests that wait for a slot.", lambda: float(len(self._door)))
        self.telemetry.watch_memory(lambda: self._engine.pid)

    @property
    def ready(self) -> bool:
        """Whether a request sent now can be answered."""
        return self._engine.up and not self.draining

    @property
    def slab(self) -> Slab:
        return self._engine.slab

    async def start(self) -> Ready:
        """Start the engine and load the bundle. Raises AgentError with the engine's reason."""
        options = self._config.engine
        load = Load(
            str(self.model.folder),
            self.model.digest,
            options.intra_op_threads,
            self._config.log.level,
            self._config.log.format,
            tuple(residency.value for residency in self.model.residencies),
            str(self.model.finalised or ""),
        )
        ready = await self._engine.start(load, options.load_s)
        self._log_ready(ready)
        self._gathering.ended(1, 0, ready.warm_s, time.monotonic())
        return ready

    def _log_ready(self, ready: Ready) -> None:
        self._log.info(
            "engine ready", model=self.model.name, version=self.model.version, runtime=ready.runtime,
            load_s=round(ready.load_s, 3), threads=self._config.engine.intra_op_threads, slots=self._pool.slots,
            restarts=self._engine.restarts, **{f"pss_{kind}": nbytes for kind, nbytes in ready.pss.items()},
        )  # fmt: skip

    async def drain(self) -> None:
        """Take nothing new and wait until what was accepted is answered, at most `drain_s`; then refuse the rest."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self._config.requests.drain_s)
        except (TimeoutError, asyncio.TimeoutError):
            self._log.warning("not everything was answered before the stop", left=len(self._calls))
            self._refuse_all(Refused(Reason.DRAINING, "the agent stopped before the request was done"))

    async def close(self) -> None:
        """End the engine."""
        if self._timer:
            self._timer.cancel()
        await self._engine.close()

    # --- the life of a call, in order

    def open(self) -> Call:
        """Begin a call. Whoever opens one must settle it."""
        now = time.monotonic()
        call = Call(next(self._ids), now, now + self._config.requests.timeout_s)
        self._calls[call.id] = call
        self._idle.clear()
        return call

    async def admit(self, call: Call) -> int:
        """Lease a slot, waiting at the door if need be. Raises RefusedError."""
        if self.draining:
            raise RefusedError(Reason.DRAINING, "the agent is stopping", "send the request to another, or later")
        self._check_engine()
        call.slot = self._pool.lease(call.id)
        if call.slot is not None:
            self._filling.add(call.id)
        else:
            self._raise(self._door.submit(call, time.monotonic()))
            self._arm(call.deadline)
            await self._answer_of(call)
        assert call.slot is not None  # noqa: S101 - for the type checker
        return call.slot

    def set_timeout(self, call: Call, timeout_s: float) -> None:
        """The client's own deadline, counted from its arrival; it can only come earlier."""
        call.deadline = min(call.deadline, call.arrived + timeout_s)

    async def infer(
        self, call: Call, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Result:
        """Run what stands in the call's slot, when there is an engine. Raises RefusedError."""
        assert call.slot is not None  # noqa: S101 - `admit` came before
        request = Request(call.id, call.deadline, call.slot, shapes, nbytes, outputs)
        self._filling.discard(call.id)
        self._raise(self._queue.submit(request, time.monotonic()))
        self._arm(call.deadline)
        self._pump()
        result: Result = await self._answer_of(call)
        return result

    def settle(self, call: Call, reason: Reason, message: str = "") -> None:
        """The end of every call, whatever it was: gives back what it held, counts and logs."""
        if self._calls.pop(call.id, None) is None:
            raise RuntimeError(f"call {call.id} was settled twice")
        self._door.cancel(call.id)
        self._queue.cancel(call.id)
        self._filling.discard(call.id)
        if call.slot is not None and call.id not in self._running:
            self._release(call.slot, call.id)
        seconds = time.monotonic() - call.arrived
        self.telemetry.settled(reason, seconds)
        write = self._log.warning if reason in _FAULTS else self._log.debug
        write("request", id=call.id, reason=reason.value, ms=round(seconds * 1e3, 3), message=message[:500])
        if not self._calls:
            self._idle.set()

    # --- what moves calls on

    def _pump(self) -> None:
        """Begin a pass, unless one goes on: a second would hide the hop between processes, but its requests could no
        longer be cancelled, expire or have company."""
        if self._running or not self._engine.up:
            return
        now = time.monotonic()
        begins = self._gathering.begins_at(len(self._queue), len(self._filling), now)
        if begins is None:
            return
        if begins > now:
            self._arm(begins)
            return
        self._running = {request.id: request for request in self._queue.take(self._together, now)}
        if self._running:
            runs = (Run(each.id, each.slot, each.shapes, each.nbytes, each.outputs) for each in self._running.values())
            self._engine.send(Pass(tuple(runs)))

    def _release(self, slot: int, owner: int) -> None:
        self._pool.release(slot, owner)
        call = self._door.next(time.monotonic())
        if call is not None:
            call.slot = self._pool.lease(call.id)
            self._filling.add(call.id)
            _resolve(call, None)

    def _on_reply(self, reply: Passed | Done | RunError) -> None:
        if isinstance(reply, Passed):
            self.telemetry.passed(reply.pass_s, reply.streamed_bytes)
            self._gathering.ended(len(self._running), len(self._queue), reply.pass_s, time.monotonic())
            return
        request = self._running.pop(reply.id, None)
        if request is None:
            self._log.error("the engine answered what was not asked", id=reply.id)
            return
        call = self._calls.get(reply.id)
        if call is None:
            self._release(request.slot, request.id)
        elif isinstance(reply, Done):
            _resolve(call, Result(tuple(Output(*output) for output in reply.outputs)))
        else:
            _reject(call, Refused(Reason(reply.reason), reply.message))
        self._pump()

    def _on_death(self, how: str, again: bool) -> None:
        """What ran is lost and answered; what waits goes on waiting for the next engine, until its deadline."""
        self._log.error("the engine process is gone", how=how, starts_again=again, in_flight=len(self._calls))
        refused = Refused(Reason.ENGINE_DOWN, f"the engine process {how}")
        running, self._running = self._running, {}
        for request in running.values():
            call = self._calls.get(request.id)
            if call is None:
                self._release(request.slot, request.id)
            else:
                _reject(call, refused)
        if not again:
            self._refuse_all(refused)
            self.given_up.set()

    def _on_ready(self, ready: Ready) -> None:
        self._log_ready(ready)
        self._pump()

    def _refuse_all(self, refused: Refused) -> None:
        for call in list(self._calls.values()):
            self._door.cancel(call.id)
            self._queue.cancel(call.id)
            _reject(call, refused)

    def _arm(self, deadline: float) -> None:
        if self._timer is None or deadline < self._wakeup:
            if self._timer:
                self._timer.cancel()
            self._wakeup = deadline
            self._timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = time.monotonic()
        late = {call.id for call in self._door.expire(now)}
        late.update(request.id for request in self._queue.expire(now))
        late.update(request.id for request in self._running.values() if request.deadline <= now)
        for id_ in late:
            if id_ in self._calls:
                _reject(self._calls[id_], EXPIRED)
        waiting = (self._door.next_wakeup(), self._queue.next_wakeup())
        running = (request.deadline for request in self._running.values() if request.deadline > now)
        wakeup = min((*(w for w in waiting if w is not None), *running), default=None)
        if wakeup is not None:
            self._arm(wakeup)
        self._pump()

    # --- small parts

    def _check_engine(self) -> None:
        if not self._engine.up:
            raise RefusedError(Reason.ENGINE_DOWN, "the engine process is being started", "try again")

    def _raise(self, refused: Refused | None) -> None:
        if refused is not None:
            raise RefusedError(refused.reason, refused.message)

    async def _answer_of(self, call: Call) -> Any:
        if call.answer is None:
            call.answer = self._loop.create_future()
        try:
            return await call.answer
        finally:
            call.answer = None


def _requests_per_pass(model: Model) -> int:
    """All slots where weights are streamed and the plan has room for what waits; else sharing would win nothing."""
    if model.manifest.plan.sweep is None or Residency.STREAMED not in model.residencies:
        return 1
    return min(model.layout.slots, most_runs(model.contract))


def _resolve(call: Call, value: Any) -> None:
    if call.answer is not None and not call.answer.done():
        call.answer.set_result(value)


def _reject(call: Call, refused: Refused) -> None:
    if call.answer is not None and not call.answer.done():
        call.answer.set_exception(RefusedError(refused.reason, refused.message))
