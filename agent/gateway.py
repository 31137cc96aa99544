"""From an admitted call to its answer: the one place where slots, scheduler and engines meet.

Theory of operation. A call goes through these stages and is settled exactly once, from whichever it is in:

    opened --> at the door --> admitted --> queued --> running --> settled
               (no slot yet)   (holds a slot: its body is read and decoded into it)

A slot is leased before the body is read, so that the tensors in memory are those that the plan counted; who waits at
the door costs a connection. One timer keeps every deadline. A call that is settled while its run goes on (deadline,
client gone) leaves its slot to the engine, and the slot is free again when the engine has answered, not before.

Every version of every model has an engine of its own, and all share one accelerator: one pass goes on at a time, and
the scheduler says which is next. A second that waits in an engine would hide the hop between processes, but its
requests could no longer be cancelled, expire or have company.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent import log
from agent.calls import Call
from agent.config import Config
from agent.engine.channel import Done, Pass, Passed, Ready, Run, RunError
from agent.errors import Reason, RefusedError
from agent.journal import Breaker, Degrade, EngineDown, EngineUp, Journal, Load
from agent.limits.rates import Rates
from agent.overload import Governor, Overload, no_governor
from agent.refusals import Refusals
from agent.request import Output, Refused, Request, Result
from agent.request_log import RequestLog
from agent.scheduling.accelerator import Accelerator
from agent.scheduling.batch import Batch
from agent.scheduling.costs import Costs
from agent.scheduling.door import Door
from agent.scheduling.queue import EXPIRED
from agent.served import Entry, Served
from agent.statistics import Ledger, Statistics
from agent.telemetry import Telemetry

if TYPE_CHECKING:
    from agent.tracing import Tracer


class Gateway:
    """Takes calls, and runs them on the engines that are attached to it."""

    def __init__(
        self, config: Config, telemetry: Telemetry, governor: Governor = no_governor, tracer: Tracer | None = None
    ) -> None:
        self.telemetry = telemetry
        self.journal = Journal(time.monotonic)
        self.overload = Overload(config.degradation, telemetry, self._fullest, governor, self._degraded)
        self.refusals = Refusals()
        self.draining = False
        self._stopped: Refused | None = None
        """Why nothing is run any more."""
        self.on_drain: list[Callable[[], None]] = []
        """Called when nothing new is taken any more."""
        self.on_leave: list[Callable[[Served], None]] = []
        """Called when a version gets no more calls, before the last of its slots is waited for."""
        self.given_up = asyncio.Event()
        """Set when every engine died too often to be started once more."""
        self._config = config
        limits = config.limits
        limited = limits.requests_per_s or limits.client_requests
        self._rates = Rates(limits.requests_per_s, limits.burst, limits.client_requests) if limited else None
        self._log = log.get("gateway")
        self._request_log = RequestLog(config.log)
        self._tracer = tracer
        self._tells_all = self._request_log.takes_answered or tracer is not None
        """Whether more is said of a request that was answered than what is counted."""
        self._loop = asyncio.get_running_loop()
        self._served: dict[str, Served] = {}
        self._ledger = Ledger()
        self._accelerator = Accelerator()
        self._batch: Batch | None = None
        self._running: dict[int, Request] = {}
        """Requests of the batch that are not answered yet, by id."""
        self._failed: set[int] = set()
        """Those of them that the engine could not run."""
        self._began = 0.0
        self._took_s = 0.0
        self._calls: dict[int, Call] = {}
        self._waiting: set[Entry] = set()
        """Models at whose doors someone may wait."""
        self._ids = itertools.count(1)
        # uvloop's own clock is cached and ticks in milliseconds, so all times are of time.monotonic().
        self._timer: asyncio.TimerHandle | None = None
        self._wakeup = 0.0
        self._pumps = False
        """Whether a pump is due in this turn of the loop."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch()
        self.overload.start()

    def _watch(self) -> None:
        def watch(name: str, text: str, read: Callable[[Served], float]) -> None:
            # Asked by a thread, while engines come and go.
            self.telemetry.watch(name, text, lambda: [(each.name, read(each)) for each in list(self._served.values())])

        watch("tightfit_engine_up", "1 while the engine can run requests.", lambda each: each.engine.up)
        watch("tightfit_in_flight", "Requests that hold a slot.", lambda each: each.pool.leased)
        watch("tightfit_slots", "Requests that can be in memory at once.", lambda each: each.pool.slots)
        watch("tightfit_queue_depth", "Requests ready to run.", self._queued_of)
        watch("tightfit_breaker_open", "1 while the model is let rest.", lambda each: each.breaker.is_open)
        watch("tightfit_running", "Requests in the pass that goes on.", self._running_of)
        watch(
            "tightfit_door_depth",
            "Requests that wait for a slot.",
            lambda each: len(each.entry.door) if each is each.entry.active else 0,
        )
        watch(
            "tightfit_door_room",
            "Requests that may wait for a slot.",
            lambda each: each.entry.room if each is each.entry.active else 0,
        )
        watch("tightfit_pool_bytes", "What requests that hold a slot have of the plan's io_slots.", _pool_bytes)
        self.telemetry.watch_parts(
            "tightfit_plan_bytes",
            "What the plan counts while requests run, by term and kind of memory.",
            ("term", "kind"),
            lambda: [each for served in list(self._served.values()) for each in _planned(served)],
        )
        self.telemetry.watch_rows(
            "tightfit_batch_rows", "Rows that went through the engine together.", self._ledger.sizes
        )
        self.telemetry.watch_count(
            "tightfit_engine_restarts",
            "Engines started after the first.",
            lambda: [(each.name, each.engine.restarts) for each in list(self._served.values())],
        )
        for name, text, attribute in (
            ("tightfit_cache_hits", "Requests answered with a kept answer.", "hits"),
            ("tightfit_cache_misses", "Requests for which no answer was kept.", "misses"),
            ("tightfit_cache_evictions", "Kept answers that made room for others.", "evictions"),
        ):
            self.telemetry.watch_count(name, text, partial(self._caches, attribute))
        self.telemetry.watch("tightfit_cache_bytes", "What kept answers take.", partial(self._caches, "nbytes"))
        self.telemetry.watch_memory(lambda: [(each.name, each.engine.pid) for each in list(self._served.values())])

    def _caches(self, attribute: str) -> list[tuple[str, float]]:
        served = list(self._served.values())
        return [(each.name, getattr(each.cached.answers, attribute)) for each in served if each.cached]

    def _fullest(self) -> float:
        """How full the fullest door is, 0..1."""
        return max((entry.fullness for entry in self._waiting), default=0.0)

    def _degraded(self, level: int, before: int, step: str, cause: str) -> None:
        self.journal.note(Degrade(level=level, before=before, step=step, cause=cause))

    def _queued_of(self, served: Served) -> float:
        return self._accelerator.waiting(served.key) if served.key in self._served else 0

    def _running_of(self, served: Served) -> float:
        return len(self._running) if self._batch and self._batch.model == served.key else 0

    @property
    def served(self) -> list[Served]:
        """All versions that have an engine, those too that get no more calls."""
        return list(self._served.values())

    def queue_of(self, served: Served) -> tuple[int, int]:
        """How many requests of a version are ready to run, and how many are in the pass that goes on."""
        return int(self._queued_of(served)), int(self._running_of(served))

    # --- engines that come and go

    def attach(self, served: Served, ready: Ready) -> None:
        """Have calls run on an engine that is loaded."""
        self._served[served.key] = served
        served.statistics = self.statistics_of(served.name, served.version)
        served.statistics.memory_bytes = sum(ready.pss.values())
        self.telemetry.add(served.name)
        self._accelerator.add(served.key, served.limits, Costs(ready.costs))
        self._log_ready(served, ready)
        self.journal.note(Load(model=served.name, version=served.version, seconds=round(ready.load_s, 3)))
        if not served.engine.up:
            self._accelerator.pause(served.key)

    def statistics_of(self, name: str, version: str) -> Statistics:
        """What that version has done, whichever engine it has now."""
        return self._ledger.of(name, version, [(each.name, each.version) for each in self._served.values()])

    def detach(self, served: Served) -> None:
        """Forget an engine that has answered all it was asked."""
        del self._served[served.key]
        self._accelerator.remove(served.key)

    def let_in(self, entry: Entry) -> None:
        """Give those at the door the slots that are free; refuse them when there is no version to wait for."""
        served = entry.active
        if served is not None and not len(entry.door):
            return
        now = time.monotonic()
        while served is not None and served.pool.leased < served.pool.slots:
            call = entry.door.first(now)
            if call is None or self._leaves_the_last(served, call, now):
                return
            entry.door.next(now)
            served.lease(call)
            self._expect(served)
            call.resolve()
        if served is None and not entry.coming:
            refused = Refused(Reason.MODEL_NOT_READY, f"model {entry.name!r} could not be loaded")
            while (call := entry.door.next(now)) is not None:
                call.reject(refused)

    async def drain(self) -> None:
        """Take nothing new and wait until what was accepted is answered, at most `drain_s`; then refuse the rest."""
        self.draining = True
        for stop in self.on_drain:
            stop()
        try:
            await asyncio.wait_for(self._idle.wait(), self._config.requests.drain_s)
        except (TimeoutError, asyncio.TimeoutError):
            self._log.warning("not everything was answered before the stop", left=len(self._calls))
            self._stopped = Refused(Reason.DRAINING, "the agent stopped before it was done")
            self._refuse(list(self._calls.values()), self._stopped)

    def close(self) -> None:
        """Keep no more deadlines."""
        self._request_log.close()
        self.overload.close()
        if self._timer:
            self._timer.cancel()

    # --- the life of a call, in order

    def open(self, client: str) -> Call:
        """Begin a call. Whoever opens one must settle it."""
        now = time.monotonic()
        call = Call(next(self._ids), now, now + self._config.requests.timeout_s, client)
        self._calls[call.id] = call
        self._idle.clear()
        return call

    async def admit(self, call: Call, entry: Entry) -> tuple[Served, int]:
        """Lease a slot of the entry's active version, waiting at the door if need be. Raises RefusedError."""
        if not self.ask(call, entry):
            await call.answered()
        return call.seat

    def ask(self, call: Call, entry: Entry) -> bool:
        """Lease a slot of the entry's active version, or let the call wait at the door: whether it has one. Who waits
        is answered when it does. Raises RefusedError."""
        if self.draining:
            raise RefusedError(Reason.DRAINING, "the agent is stopping", "send the request to another, or later")
        entry.check()
        call.entry = entry
        self._check_limits(call, entry)
        call.priority = call.priority or entry.options.priority
        self.overload.check(call.priority)
        if call.dated and entry.active is not None:
            # Before its body is read: what runs first may be too much already.
            self._raise(self._accelerator.predict(entry.active.key, call, 0, time.monotonic(), rows=0))
        if self._next_in(entry, call) and entry.active is not None and entry.active.lease(call):
            self._expect(entry.active)
            return True
        self._wait_at(entry.door, call, entry)
        return False

    def _check_limits(self, call: Call, entry: Entry) -> None:
        """Raise RefusedError where its client asks too often or too much, or where the model fails again and again."""
        if self._rates is not None:
            now = time.monotonic()
            if wait_s := self._rates.wait_s(call.client, now):
                raise RefusedError(
                    Reason.RATE_LIMITED, "this client asks more often than one may", f"try again in {wait_s} s", wait_s
                )
            if not call.counted:
                call.counted = self._rates.begin(call.client)
                if not call.counted:
                    raise RefusedError(
                        Reason.CLIENT_BUSY,
                        f"{self._config.limits.client_requests} requests of this client go on, as many as may",
                        "wait for an answer first",
                    )
        if entry.active is not None and entry.active.breaker.is_open:
            left_s = entry.active.breaker.wait_s(call.id, call.client, time.monotonic())
            if left_s:
                raise RefusedError(
                    Reason.CIRCUIT_OPEN,
                    f"model {entry.name!r} failed too often in a row",
                    "it is tried again soon",
                    math.ceil(left_s),
                )

    def _failed_once_more(self, served: Served, client: str | None) -> None:
        """A request of that client failed in the engine, or, None, the engine died over one."""
        if served.breaker.failed(client, time.monotonic()):
            self._log.error("the model fails again and again, and is let rest", model=served.name)
            self.journal.note(Breaker(model=served.name, version=served.version, open=True))

    def _next_in(self, entry: Entry, call: Call) -> bool:
        """Whether a call that comes now may have a slot at once: it goes behind those at the door that go before it."""
        now = time.monotonic()
        if len(entry.door) and entry.door.before(call, now):
            return False
        return entry.active is not None and not self._leaves_the_last(entry.active, call, now)

    def _leaves_the_last(self, served: Served, call: Call, now: float) -> bool:
        """Whether the last free slot is kept for somebody more important, where there are enough for the others."""
        free = served.pool.slots - served.pool.leased
        return free == 1 and served.pool.slots > 2 and self._accelerator.yields(call.priority, now)

    def _wait_at(self, door: Door[Call], call: Call, entry: Entry) -> None:
        now = time.monotonic()
        if entry.active is not None:
            self._raise(self._accelerator.predict(entry.active.key, call, door.before(call, now), now))
        self._raise(door.submit(call, now))
        self._waiting.add(entry)
        self._arm(call.deadline)

    def set_timeout(self, call: Call, timeout_s: float, waited_s: float = 0.0) -> None:
        """The client's own deadline, counted from its arrival; it can only come earlier. `waited_s` is how long what
        was just read lay in the socket: where the loop has more to do than it can, longer than all that follows."""
        call.dated = True
        call.arrived = min(call.arrived, time.monotonic() - waited_s)
        call.deadline = min(call.deadline, call.arrived + timeout_s)

    def foresee(self, call: Call, runs: int) -> None:
        """Raise RefusedError where so many runs, one after the other, would not be done by the call's deadline."""
        served, _ = call.seat
        self._raise(self._accelerator.predict(served.key, call, runs - 1, time.monotonic()))

    async def infer(
        self, call: Call, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Result:
        """Run what stands in the call's slot, when there is an engine. Raises RefusedError."""
        request = self._filled(call, shapes, nbytes, outputs)
        served, _ = call.seat
        if served.cached is None:
            return await self._run(call, request)
        return await served.cached.infer(call, request, partial(self._run, call, request))

    async def step(
        self, call: Call, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...], outputs: tuple[int, ...],
        turn: bool,
    ) -> Result:  # fmt: skip
        """One run of a session, whose state stays in the call's slot from one to the next. It waits as a request that
        comes now, so that others have their turn. Raises RefusedError."""
        # Between two runs a session waits for nothing, and so was not refused with all others.
        self._raise(self._stopped)
        served, slot = call.seat
        request = served.request(call, slot, shapes, nbytes, outputs)
        call.inputs = nbytes
        served.filling.discard(call.id)
        self._expect(served)
        return await self._run(call, replace(request, arrived=time.monotonic(), turn=turn))

    def leave_slot(self, call: Call, owner: int) -> None:
        """The call's slot, and what is in it, is somebody else's from now on."""
        served, slot = call.seat
        served.pool.pass_on(slot, call.id, owner)
        call.slot = None

    def move_to(self, call: Call, slot: int, owner: int) -> None:
        """The call gives back its slot and has another of that version instead, which is `owner`'s."""
        served, own = call.seat
        served.pool.pass_on(slot, owner, call.id)
        call.slot = slot
        self._release(served, own, call.id)

    def give_back(self, served: Served, slot: int, owner: int) -> None:
        """A slot that was left to somebody is free."""
        self._release(served, slot, owner)

    def prolong(self, call: Call, timeout_s: float) -> None:
        """The next deadline of a session, which was in time until now: so long from now."""
        call.deadline = time.monotonic() + timeout_s

    def submit(
        self, call: Call, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...], outputs: tuple[int, ...]
    ) -> None:
        """Have what stands in the call's slot run, of a version that keeps no answers: the call is answered with its
        Result. Raises RefusedError."""
        self._queue(call, self._filled(call, shapes, nbytes, outputs))

    def _filled(
        self, call: Call, shapes: tuple[tuple[int, ...], ...], nbytes: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Request:
        """What is to be run: the call is no longer one that comes."""
        served, slot = call.seat
        self.overload.check(call.priority)
        request = served.request(call, slot, shapes, nbytes, outputs)
        call.inputs = nbytes
        served.filling.discard(call.id)
        self._expect(served)
        return request

    async def _run(self, call: Call, request: Request) -> Result:
        self._queue(call, request)
        result: Result = await call.answered()
        return result

    def _queue(self, call: Call, request: Request) -> None:
        now = time.monotonic()
        call.queued, call.rows = call.queued or now, request.rows
        self._raise(self._accelerator.submit(request, now))
        self._arm(call.deadline)
        if not self._pumps:
            # What is ready in this turn of the loop is queued first, so that the first of many does not run alone.
            self._pumps = True
            self._loop.call_soon(self._pump)

    def settle(self, call: Call, reason: Reason, message: str = "") -> None:
        """The end of every call, whatever it was: gives back what it held, counts and logs."""
        try:
            if reason is not Reason.OK or self._tells_all:
                self._tell(call, reason, message)
        finally:
            self._end(call)
        now = time.monotonic()
        statistics = call.statistics
        if statistics is None and call.entry is not None and call.entry.active is not None:
            # It was refused at the door.
            statistics = call.entry.active.statistics
        if statistics is not None:
            statistics.settled(call, reason is Reason.OK, now, time.time())
        model = call.entry.name if call.entry else call.name
        self.telemetry.settled(model, call, reason, now)
        if reason is not Reason.OK:
            self.refusals.note(model, reason, message, time.time())
        self.overload.settled(reason, len(self._calls))

    def _tell(self, call: Call, reason: Reason, message: str) -> None:
        """Say what became of a call, while what it was about stands in its slot."""
        if call.id in self._running:
            self._note_pass(call)
        self._request_log.settled(call, reason, message)
        if self._tracer is not None:
            self._tracer.settled(call, reason)

    def withdraw(self, call: Call) -> None:
        """The end of a call whose request begins anew, as another one: nothing of it is counted."""
        self._end(call)

    def _end(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is None:
            raise RuntimeError(f"call {call.id} was settled twice")
        if call.entry is not None and call.served is None:
            call.entry.door.cancel(call.id)
        self._accelerator.cancel(call.id)
        if call.counted and self._rates is not None:
            self._rates.end(call.client)
        if call.entry is not None and call.entry.active is not None and call.entry.active.breaker.is_open:
            call.entry.active.breaker.left(call.id)
        if call.served is not None and call.slot is not None:
            call.served.filling.discard(call.id)
            self._expect(call.served)
            if call.id not in self._running:
                self._release(call.served, call.slot, call.id)
        if not self._calls:
            self._idle.set()

    # --- what moves calls on

    def _pump(self) -> None:
        """Begin the next pass, unless one goes on."""
        self._pumps = False
        if not len(self._accelerator):
            return
        now = time.monotonic()
        self._expire(now)
        batch = self._accelerator.next(now)
        if batch is not None:
            self._batch, self._began = batch, now
            self._running = {request.id: request for request in batch.requests}
            groups = (
                tuple(Run(each.id, each.slot, each.shapes, each.nbytes, each.outputs, each.turn) for each in group)
                for group in batch.groups
            )
            self._served[batch.model].engine.send(Pass(tuple(groups)))
        wakeup = self._accelerator.next_wakeup(now)
        if wakeup is not None:
            self._arm(wakeup)

    def _release(self, served: Served, slot: int, owner: int) -> None:
        served.release(slot, owner)
        if served is served.entry.active:
            self.let_in(served.entry)

    def _expect(self, served: Served) -> None:
        """Tell the scheduler who is on his way, where requests share a pass."""
        if served.limits.shared and served.key in self._served:
            self._accelerator.expect(served.key, len(served.filling))

    def on_reply(self, served: Served, reply: Passed | Done | RunError) -> None:
        """The engine's answer to a request, or what the pass took."""
        if isinstance(reply, Passed):
            self.telemetry.passed(served.name, len(self._running), reply.pass_s, reply.streamed_bytes)
            self._took_s = reply.pass_s
            return
        request = self._running.pop(reply.id, None)
        if request is None:
            self._log.error("the engine answered what was not asked", model=served.name, id=reply.id)
            return
        call = self._calls.get(reply.id)
        if call is None:
            self._release(served, request.slot, request.id)
        elif isinstance(reply, Done):
            if served.breaker.succeeded():
                self.journal.note(Breaker(model=served.name, version=served.version, open=False))
            self._note_pass(call)
            call.compute_s += self._took_s
            call.ended = now = time.monotonic()
            if call.deadline < now:
                # The timer, which is as late as the loop, would have said so.
                call.reject(EXPIRED)
            call.resolve(Result(tuple(Output(*output) for output in reply.outputs)))
        else:
            self._note_pass(call)
            call.reject(Refused(Reason(reply.reason), reply.message))
        if isinstance(reply, RunError):
            self._failed.add(reply.id)
            self._failed_once_more(served, request.client)
        if not self._running:
            self._ended(self._took_s)

    def _note_pass(self, call: Call) -> None:
        """Have the call know what it is part of."""
        call.began, call.batch = call.began or self._began, self._batch

    def _ended(self, took_s: float | None) -> None:
        """The pass is over; None: it was lost."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            if took_s is not None:
                self._count(batch, took_s)
            self._failed.clear()
            self._accelerator.ended(batch, took_s, time.monotonic())
        self._pump()

    def _count(self, batch: Batch, took_s: float) -> None:
        """Note every group of the pass of which a request was computed; they share the time that it took."""
        statistics = self._served[batch.model].statistics
        share_s = took_s / len(batch.groups)
        for group in batch.groups:
            if not self._failed.issuperset([request.id for request in group]):
                statistics.executed(sum([request.rows for request in group]), share_s)

    def on_death(self, served: Served, how: str, again: bool) -> None:
        """What ran is lost and answered; what waits goes on waiting for the next engine, until its deadline."""
        self._log.error("the engine process is gone", model=served.name, how=how, starts_again=again)
        self.journal.note(EngineDown(model=served.name, version=served.version, how=how, starts_again=again))
        if served.key not in self._served:
            return
        refused = Refused(Reason.ENGINE_DOWN, f"the engine process {how}")
        self._accelerator.pause(served.key)
        if not again:
            self._give_up(served, refused)
        if self._batch is not None and self._batch.model == served.key:
            self._failed_once_more(served, None)
            running, self._running = self._running, {}
            for request in running.values():
                call = self._calls.get(request.id)
                if call is None:
                    self._release(served, request.slot, request.id)
                else:
                    self._note_pass(call)
                    call.reject(refused)
            self._ended(None)

    def _give_up(self, served: Served, refused: Refused) -> None:
        """There will be no next engine: refuse who has a slot of it, or waits for one."""
        entry = served.entry
        is_active = entry.active is served
        if is_active:
            entry.reason = refused.message
        lost = [
            each
            for each in self._calls.values()
            if each.served is served or (is_active and each.entry is entry and each.served is None)
        ]
        self._refuse(lost, refused)
        if all(each.engine.given_up for each in self._served.values()):
            self.given_up.set()

    def on_ready(self, served: Served, ready: Ready) -> None:
        """An engine that was started again can run requests."""
        self._log_ready(served, ready)
        self.journal.note(EngineUp(model=served.name, version=served.version, restarts=served.engine.restarts))
        if served.key in self._served:
            self._accelerator.resume(served.key)
            self._pump()

    def _refuse(self, calls: list[Call], refused: Refused) -> None:
        for call in calls:
            if call.entry is not None:
                call.entry.door.cancel(call.id)
            self._accelerator.cancel(call.id)
            call.reject(refused)

    # --- deadlines

    def _arm(self, deadline: float) -> None:
        if self._timer is None or deadline < self._wakeup:
            if self._timer:
                self._timer.cancel()
            self._wakeup = deadline
            self._timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = time.monotonic()
        late = [call.id for entry in self._waiting for call in entry.door.expire(now)]
        self._waiting = {entry for entry in self._waiting if len(entry.door)}
        late += [request.id for request in self._running.values() if request.deadline <= now]
        self._reject_late(late)
        doors = (entry.door.next_wakeup() for entry in self._waiting)
        running = (request.deadline for request in self._running.values() if request.deadline > now)
        wakeup = min((*(each for each in doors if each is not None), *running), default=None)
        if wakeup is not None:
            self._arm(wakeup)
        self._pump()

    def _expire(self, now: float) -> None:
        self._reject_late([request.id for request in self._accelerator.expire(now)])

    def _reject_late(self, late: list[int]) -> None:
        for id_ in late:
            if id_ in self._calls:
                self._calls[id_].reject(EXPIRED)

    # --- small parts

    def _log_ready(self, served: Served, ready: Ready) -> None:
        self._log.info(
            "engine ready", model=served.name, version=served.version, runtime=ready.runtime,
            load_s=round(ready.load_s, 3), threads=self._config.engine.intra_op_threads, slots=served.pool.slots,
            restarts=served.engine.restarts, **{f"pss_{kind}": nbytes for kind, nbytes in ready.pss.items()},
        )  # fmt: skip

    def _raise(self, refused: Refused | None) -> None:
        if refused is not None:
            raise RefusedError(refused.reason, refused.message)


def _pool_bytes(served: Served) -> float:
    return served.pool.leased * served.slab.layout.slot_bytes


def _planned(served: Served) -> Iterable[tuple[tuple[str, str, str], float]]:
    for term in served.model.manifest.plan.phase("run").terms:
        yield (served.name, term.name, term.kind), term.nbytes
