"""Keeps an engine process there: notices when it dies or hangs, and starts the next one.

Theory of operation. One engine at a time; the slab outlives them all, so that requests whose bodies are being read
notice nothing. A pass is given a limit, by what passes take (`Patience`): an engine that does not answer within it
(stopped, a driver that hangs) is killed, and what follows is the same as after a crash:

    up --> dead (crash, hang, out of memory) --> waits (back-off) --> loads --> up
                                  `--> too many deaths within the window: given up

`Backoff` decides, and is pure.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable

import msgspec

from agent import log
from agent.engine.channel import Done, Layout, Load, Pass, Passed, Ready, RunError, Slab
from agent.engine.host import AnyEngine, new_engine
from agent.errors import AgentError

# The first death is answered at once; of those that follow each waits twice as long, up to a limit.
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 30.0
# So many times what a pass should take; machines are slow at times.
HANG_FACTOR = 20


class Backoff:
    """How long to wait before the next start. Pure: time is an argument (monotonic seconds)."""

    def __init__(self, most: int, window_s: float) -> None:
        """`most` restarts within `window_s` are tried, then no more."""
        self._most, self._window_s = most, window_s
        self._deaths: collections.deque[float] = collections.deque(maxlen=most + 1)

    def died(self, now: float) -> float | None:
        """Seconds to wait after this death; None when there were too many within the window."""
        while self._deaths and self._deaths[0] <= now - self._window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        number = len(self._deaths)
        if number > self._most:
            return None
        return 0.0 if number == 1 else min(FIRST_WAIT_S * 2.0 ** (number - 2), LONGEST_WAIT_S)


class Patience:
    """How long a pass may take before the engine is taken to hang. Pure.

    `HANG_FACTOR` times what is expected, for each batch the most of: the longest pass that there was, those measured
    when the bundle was loaded, and what the sample took for as many bytes. Never less than `least_s`.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._longest_s = 0.0
        self._s_per_byte = 0.0

    def ready(self, ready: Ready) -> None:
        """What the engine says of the sample; one that starts cold says nothing, and what was said before stands."""
        self._longest_s = max(self._longest_s, ready.warm_s, *(seconds for _, seconds in ready.costs))
        if ready.sample_bytes:
            self._s_per_byte = ready.warm_s / ready.sample_bytes

    def passed(self, pass_s: float) -> None:
        """A pass took so long."""
        self._longest_s = max(self._longest_s, pass_s)

    def limit_s(self, runs: Pass) -> float:
        """Seconds that the pass may take."""
        sizes = [sum(sum(run.nbytes) for run in batch) for batch in runs.batches]
        expected_s = sum(max(self._longest_s, self._s_per_byte * size) for size in sizes)
        return max(self._least_s, HANG_FACTOR * expected_s)


class Supervisor:
    """The engine, whichever process it is now.

    `on_reply` hears every answer. `on_death` hears why an engine is gone, and whether another follows; `on_ready`
    when one that followed can run requests.
    """

    def __init__(
        self,
        layout: Layout,
        backoff: Backoff,
        hang_s: float,
        on_reply: Callable[[Passed | Done | RunError], None],
        on_death: Callable[[str, bool], None],
        on_ready: Callable[[Ready], None],
        inline: bool = False,
    ) -> None:
        self.slab = Slab.create(layout)
        self.restarts = 0
        self.given_up = False
        """Whether it died too often to be started once more."""
        self._backoff, self._patience = backoff, Patience(hang_s)
        self._on_reply, self._on_death, self._on_ready = on_reply, on_death, on_ready
        self._inline = inline
        self._log = log.get("gateway")
        self._engine: AnyEngine | None = None
        self._load: Callable[[], Load] | None = None
        self._load_limit_s = 0.0
        self._limit: asyncio.TimerHandle | None = None
        self._limit_s = 0.0
        self._hung = ""
        self._restarting: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def up(self) -> bool:
        """Whether it can run requests now."""
        return self._engine is not None and self._engine.up

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._engine.pid if self._engine else None

    async def start(self, load: Callable[[], Load], load_limit_s: float) -> Ready:
        """Start the first engine and wait until the bundle is loaded. Raises AgentError with its reason.

        `load` is asked before each start for what to load, and how.
        """
        self._load, self._load_limit_s = load, load_limit_s
        self._engine = new_engine(self._inline, self.slab, self._replied, self._died)
        return self._started(await self._engine.start(load(), load_limit_s))

    def send(self, runs: Pass) -> None:
        """Hand over a pass, while the engine is up."""
        if self._engine is None:
            raise RuntimeError("no engine was started")
        loop = asyncio.get_running_loop()
        self._limit_s = self._patience.limit_s(runs)
        self._limit = loop.call_later(self._limit_s, self._hangs)
        self._engine.send(runs)

    async def close(self) -> None:
        """End the engine, or the wait for the next."""
        self._closing = True
        self._end_limit()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._engine is not None:
            await self._engine.close()
        # Tens of milliseconds where it is large.
        await asyncio.to_thread(self.slab.close)

    def _started(self, ready: Ready) -> Ready:
        self._patience.ready(ready)
        return ready

    def _replied(self, reply: Passed | Done | RunError) -> None:
        if isinstance(reply, Passed):
            self._end_limit()
            self._patience.passed(reply.pass_s)
        self._on_reply(reply)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _hangs(self) -> None:
        self._limit = None
        self._hung = f"did not answer within {self._limit_s:.3g} s and was stopped"
        if self._engine is not None:
            self._engine.kill()

    def _died(self, how: str) -> None:
        self._end_limit()
        how, self._hung = self._hung or how, ""
        wait_s = self._wait_after(how)
        if wait_s is not None and not self._closing:
            self._restarting = asyncio.get_running_loop().create_task(self._restart(wait_s))

    def _wait_after(self, how: str) -> float | None:
        """Seconds to wait after this death, once it was told; None when there were too many."""
        wait_s = self._backoff.died(time.monotonic())
        self.given_up = wait_s is None
        self._on_death(how, not self.given_up)
        return wait_s

    async def _restart(self, wait_s: float) -> None:
        """Start engines until one is ready, or there were too many."""
        if self._load is None:
            raise RuntimeError("no engine was started")
        while True:
            await asyncio.sleep(wait_s)
            if self._engine is not None:
                await self._engine.close()
            self.restarts += 1
            self._engine = new_engine(self._inline, self.slab, self._replied, self._died)
            try:
                # Any slot may hold a request that waits; it warms the engine as well as the sample would.
                load = msgspec.structs.replace(self._load(), sample_slot=None)
                ready = await self._engine.start(load, self._load_limit_s)
            except AgentError as error:
                again = self._wait_after(str(error))
                if again is None:
                    return
                wait_s = again
            else:
                self._on_ready(self._started(ready))
                return
