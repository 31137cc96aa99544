"""An engine inside the gateway's process, on one thread: no second interpreter, which is some 25 MiB less.

What is lost: whatever ends the runtime (a crash, want of memory) ends the agent and its connections; a pass that hangs
cannot be ended; and loading, as all that Python does for a pass, takes time from the gateway. It is imported when it is
configured and not before, as it brings the runtime.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

from agent import log
from agent.engine.channel import Done, Load, Pass, Passed, Ready, RunError, Slab
from agent.engine.host import OnDeath, OnReply
from agent.engine.loading import Loaded, load, manifest_of
from agent.engine.residency import give_freed_blocks_back
from agent.errors import AgentError
from agent.memory import pss_by_kind
from targets.errors import TightfitError


class InlineEngine:
    """As `agent.engine.host.EngineHost`. `on_death` is never called, unless the engine cannot go on."""

    pid = None
    """It has no process of its own."""

    def __init__(self, slab: Slab, on_reply: OnReply, on_death: OnDeath) -> None:
        self._slab = slab
        self._on_reply, self._on_death = on_reply, on_death
        self._log = log.get("gateway")
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "engine")
        self._loaded: Loaded | None = None
        self.up = False

    async def start(self, message: Load, timeout_s: float) -> Ready:
        """Load the bundle and warm it up. Raises AgentError with the reason."""
        self._log.warning(
            "the engine runs in the gateway's process: what ends the runtime ends the agent, and a pass that hangs "
            "is not ended"
        )
        loading = self._loop.run_in_executor(self._thread, self._load, message)
        try:
            ready = await asyncio.wait_for(asyncio.shield(loading), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentError(f"the engine did not load within {timeout_s:g} s", "raise load_s under [engine]") from None
        except TightfitError as error:
            raise AgentError(error.message, error.hint) from None
        self.up = True
        return ready

    def send(self, runs: Pass) -> None:
        """Have the pass made; its answers are heard in the loop."""
        if self._loaded is None:
            raise RuntimeError("no bundle was loaded")
        passing = self._thread.submit(self._loaded.engine.run, runs.batches)
        passing.add_done_callback(lambda ended: self._loop.call_soon_threadsafe(self._answered, ended))

    def kill(self) -> None:
        """A thread cannot be ended."""
        self._log.error("the engine hangs, and as it has no process of its own it cannot be ended: restart the agent")

    async def close(self) -> None:
        """Wait for the pass that goes on, and give the memory back."""
        self.up = False
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await self._loop.run_in_executor(self._thread, loaded.engine.close)
        self._thread.shutdown(wait=False)

    def _load(self, message: Load) -> Ready:
        give_freed_blocks_back()
        started = time.perf_counter()
        self._loaded = loaded = load(message, manifest_of(message), self._slab)
        load_s = time.perf_counter() - started
        return Ready(
            loaded.engine.runtime, load_s, loaded.warm_s, pss_by_kind(os.getpid()), loaded.costs, loaded.sample_bytes
        )

    def _answered(self, passing: Future[tuple[Passed, list[Done | RunError]]]) -> None:
        if not self.up:
            return
        error = passing.exception()
        if error is not None:
            self.up = False
            self._on_death(f"failed: {type(error).__name__}: {error}")
            return
        passed, answers = passing.result()
        for reply in (passed, *answers):
            self._on_reply(reply)
