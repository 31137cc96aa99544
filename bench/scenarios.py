"""What the benchmark of the scheduler does to a server: each scenario returns the figures of one round.

Keys of figures end in their unit. Shares are of 1; latencies are from when a request was due.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from agent.load.arrivals import Pick, Share, Spacing, arrivals, picks
from agent.load.client import Client, run, session_of
from agent.load.report import run_of
from agent.load.samples import Kind, Message
from bench.rivals.server import Server
from bench.traffic import LOST, OK, UNANSWERED, Answer, Connection, Target, calling, raw, send_and_leave

Figures = dict[str, float]
T = TypeVar("T")

HIGH, LOW = 1, 2
LOW_CLIENTS = 16
DEADLINE_PASSES = 3
"""Of the flood's deadline client, in times of one request alone: 30 ms for a model of 10 ms."""
# Between two requests of the clients beside the flood, which are not to be a flood themselves.
_PAUSE_S = 0.05
_ABANDONED = 60
# Live requests in front of the abandoned ones, so that these are queued, none running, when their clients leave.
_IN_FRONT = 24
_RATE = 200.0
_GIVE_UP_S = 5.0
# Connections of the open loop: more than any server here lets wait.
_CONNECTIONS = 128
_CAPACITY_CONNECTIONS = 32
_WARM_S = 0.5
_BEFORE_FAULT_S = 1.0
MIB = 1 << 20
_SETTLE_S = 0.2


# --- load


def capacity(target: Target, seconds: float) -> float:
    """Answers a second in closed loop, of requests without a deadline."""

    async def work() -> float:
        stop = asyncio.Event()
        async with session_of(_CAPACITY_CONNECTIONS) as session:
            client = _client(session, target, target.message(), _CAPACITY_CONNECTIONS)
            await client.capacity(_picks(0), _WARM_S, stop)
            return (await client.capacity(_picks(0), seconds, stop))[0]

    return _run(work)


def at_load(target: Target, rate: float, deadline_s: float, seconds: float, seed: int) -> tuple[Figures, Counter[str]]:
    """(figures, why requests had no answer of status 200): Poisson arrivals at so many a second, all with a deadline.
    Of refused requests there is no latency; one that is never answered counts as the time it was waited for."""

    async def work() -> tuple[Figures, Counter[str]]:
        async with session_of(_CONNECTIONS) as session:
            client = _client(session, target, target.message(timeout=round(deadline_s * 1e6)), _CONNECTIONS)
            schedule = arrivals(rate, Spacing.POISSON, _WARM_S, seconds, None, _picks(seed), seed)
            measured = await client.measure(schedule, _WARM_S, deadline_s, asyncio.Event())
        run, _ = run_of(rate, None, seconds, ["all"], measured, ())
        latency = run.all.latency_ms or {}
        figures = {
            "requests": float(run.all.requests),
            "offered_per_s": run.all.offered_per_s,
            "answered_per_s": run.all.answered / run.span_s,
            "goodput_per_s": run.all.in_time / run.span_s,
            "p50_ms": latency.get("p50", float("nan")),
            "p99_ms": latency.get("p99", float("nan")),
            "generator_late_p99_ms": run.late_p99_ms,
            "generator_cpu_share": run.cpu_share,
        }
        return figures, Counter(run.all.failures)

    return _run(work)


def _client(session: aiohttp.ClientSession, target: Target, message: Message, connections: int) -> Client:
    kinds = [Kind("all", 1.0, (message,))]
    return Client(session, URL(target.server.address), kinds, connections, _GIVE_UP_S)


def _picks(seed: int) -> Iterator[Pick]:
    return picks([Share(1.0, 1)], seed)


# --- one server under stress


def flood(target: Target, pass_s: float, seconds: float) -> Figures:
    """16 clients of low priority in closed loop, one of high priority, one with a deadline that can be met by whoever
    puts it first, and one with a deadline that cannot be met while anything else runs. `pass_s` is what one request
    takes alone. Before, for a third of the time each: high priority alone, and low priority alone."""
    high, low = target.message(priority=HIGH), target.message(priority=LOW)
    deadline = target.message(priority=LOW, timeout=round(DEADLINE_PASSES * pass_s * 1e6))
    hopeless = target.message(priority=LOW, timeout=round(pass_s * 1e6))

    async def work() -> Figures:
        async with calling(target.server) as caller:
            unloaded = await caller.loop(high, _when(seconds / 3), _PAUSE_S)
            ended = _when(seconds / 3)
            alone = await asyncio.gather(*(caller.loop(low, ended) for _ in range(LOW_CLIENTS)))
            ended = _when(seconds)
            lows = [caller.loop(low, ended) for _ in range(LOW_CLIENTS)]
            others = [caller.loop(message, ended, _PAUSE_S) for message in (high, deadline, hopeless)]
            *answers, urgent, dated, late = await asyncio.gather(*lows, *others)
        flooding = list(itertools.chain(*answers))
        answered = _good([*flooding, *urgent, *dated, *late])
        refused = _refused(late)
        return {
            "high_unloaded_p50_ms": quantile_ms(_good(unloaded), 0.5),
            "high_unloaded_p99_ms": quantile_ms(_good(unloaded), 0.99),
            "high_p50_ms": quantile_ms(_good(urgent), 0.5),
            "high_p99_ms": quantile_ms(_good(urgent), 0.99),
            "high_refused": float(len(_refused(urgent))),
            "low_p99_ms": quantile_ms(_good(flooding), 0.99),
            "alone_per_s": len(_good(list(itertools.chain(*alone)))) / (seconds / 3),
            "flood_per_s": len(answered) / seconds,
            "deadline_kept_share": _in_time(dated, DEADLINE_PASSES * pass_s) / max(len(dated), 1),
            "hopeless_refused_share": len(refused) / max(len(late), 1),
            "refusal_p50_ms": quantile_ms(refused, 0.5),
            "refusal_p99_ms": quantile_ms(refused, 0.99),
        }

    return _run(work)


def idle(target: Target, pass_s: float, tries: int) -> Figures:
    """Requests with the flood's deadline to a server that does nothing else, one after the other."""
    message = target.message(timeout=round(DEADLINE_PASSES * pass_s * 1e6))

    async def work() -> Figures:
        async with calling(target.server) as caller:
            answers = []
            for _ in range(tries):
                answers.append(await caller.ask(message))
                await asyncio.sleep(_PAUSE_S / 2)
        good = _good(answers)
        return {
            "tries": float(tries),
            "refused": float(tries - len(good)),
            "late": float(len(good) - _in_time(good, DEADLINE_PASSES * pass_s)),
            "max_ms": quantile_ms(answers, 1.0),
        }

    return _run(work)


def abandon(target: Target) -> Figures:
    """60 clients send a request each and are gone while others are served; then a live request."""
    message = target.message()

    async def work() -> Figures:
        async with calling(target.server) as caller:
            baseline = [await caller.ask(message) for _ in range(10)]
            before = await _settled_count(target)
            in_front = [asyncio.ensure_future(caller.ask(message)) for _ in range(_IN_FRONT)]
            await asyncio.sleep(_PAUSE_S)
            await send_and_leave(target.server, message, _ABANDONED)
            served = _good(await asyncio.gather(*in_front))
            live = await caller.ask(message)
            executed = await _settled_count(target) - before - len(served) - (live.status == OK)
        return {
            "abandoned": float(_ABANDONED),
            "executed": float(executed),
            "next_ms": live.seconds * 1e3,
            "baseline_ms": quantile_ms(baseline, 0.5),
        }

    return _run(work)


async def _settled_count(target: Target) -> int:
    """Requests executed so far, when that no longer grows."""
    given_up, seen = _when(_GIVE_UP_S), -1
    while not given_up():
        await asyncio.sleep(_SETTLE_S)
        count = await asyncio.to_thread(target.server.count_executed, target.path)
        if count == seen:
            break
        seen = count
    return seen


def take_turns(ways: Mapping[str, Callable[[], object]], calls: int, block: int = 25) -> dict[str, list[float]]:
    """Seconds of each call by name, one after the other, in blocks that take turns."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(calls // block, 1)):
        for name, call in ways.items():
            call()
            for _ in range(block):
                began = time.perf_counter()
                call()
                took[name].append(time.perf_counter() - began)
    return took


@contextlib.contextmanager
def asking(target: Target) -> Iterator[Callable[[], bytes]]:
    """A call that sends one request over a bare socket and returns the answer's body."""
    with contextlib.closing(Connection(target.server)) as connection:
        request = raw(target.message())
        yield lambda: connection.exchange(request)


# --- models that come and go, engines that die


def reloads(target: Target, other: str, times: int, steady_s: float) -> tuple[Figures, Counter[str]]:
    """(figures, why requests had no answer of status 200): evenly spaced requests to the target, alone and then while
    its server unloads and loads another model."""

    async def work() -> tuple[Figures, Counter[str]]:
        message, server = target.message(), target.server
        async with calling(server) as caller:
            # What the first load takes a process never gives back.
            await asyncio.to_thread(_reload, server, other, 1)
            await caller.at_rate(message, _RATE, _when(_WARM_S))
            steady = await caller.at_rate(message, _RATE, _when(steady_s))
            before, began = server.pss(), time.monotonic()
            reloading = asyncio.ensure_future(asyncio.to_thread(_reload, server, other, times))
            meanwhile = await caller.at_rate(message, _RATE, reloading.done)
            await reloading
            took_s = time.monotonic() - began
        await asyncio.sleep(_SETTLE_S)
        return {
            "reloads": float(times),
            "reload_s": took_s / times,
            "steady_p99_ms": quantile_ms(_good(steady), 0.99),
            "meanwhile_p99_ms": quantile_ms(_good(meanwhile), 0.99),
            "meanwhile_max_ms": quantile_ms(_good(meanwhile), 1.0),
            "requests": float(len(meanwhile)),
            "failed": float(len(_refused(meanwhile))),
            "pss_before_mib": before / MIB,
            "pss_after_mib": server.pss() / MIB,
        }, Counter(each.failure for each in _refused(meanwhile))

    return _run(work)


def _reload(server: Server, model: str, times: int) -> None:
    for _ in range(times):
        server.control(model, "unload")
        server.control(model, "load")


def fault(target: Target, number: signal.Signals, seconds: float) -> tuple[Figures, Counter[str]]:
    """(figures, why requests had no answer of status 200): 200 requests a second, and after a second of them a signal
    to what runs the model. One that is stopped and not noticed is let go on in the end."""

    async def work() -> tuple[Figures, Counter[str]]:
        async with calling(target.server) as caller:
            asking = asyncio.ensure_future(caller.at_rate(target.message(), _RATE, _when(_BEFORE_FAULT_S + seconds)))
            await asyncio.sleep(_BEFORE_FAULT_S)
            engines, at = target.server.engines(), time.monotonic()
            for pid in engines:
                os.kill(pid, number)
            await asyncio.sleep(seconds - _WARM_S)
            unnoticed = set(engines) & set(target.server.processes())
            for pid in unnoticed:
                os.kill(pid, signal.SIGCONT)
            answers = await asking
        back = min((each.ended for each in _good(answers) if each.due > at), default=float("nan"))
        return {
            "requests": float(len(answers)),
            "ok": float(len(_good(answers))),
            "refused": float(sum(each.status not in (OK, LOST) for each in answers)),
            "unanswered": float(sum(each.failure == UNANSWERED for each in answers)),
            "lost": float(sum(each.status == LOST and each.failure != UNANSWERED for each in answers)),
            "noticed": float(bool(engines) and not unnoticed),
            "back_s": back - at,
        }, Counter(each.failure for each in _refused(answers))

    return _run(work)


# --- small parts


def quantile_ms(answers: Sequence[Answer], share: float) -> float:
    """Of the latencies, by rank; NaN without any."""
    return quantile([each.seconds for each in answers], share) * 1e3


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed; NaN without any."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else float("nan")


def _good(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.status == OK]


def _refused(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.status != OK]


def _in_time(answers: Sequence[Answer], seconds: float) -> int:
    return sum(answer.seconds <= seconds for answer in _good(answers))


def _when(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since now."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """To its end, or to the first Ctrl-C."""

    async def unless(stop: asyncio.Event) -> T:
        task, stopped = asyncio.ensure_future(work()), asyncio.ensure_future(stop.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            raise KeyboardInterrupt
        return task.result()

    return run(unless)
