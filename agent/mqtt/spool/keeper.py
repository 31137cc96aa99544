"""The spool on an event loop: a thread of its own does what waits for the storage, the loop never does.

position = await keeper.append("a", "agent/a/door", body, urgent=True)    # durable, or None: refused and counted
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from agent.bell import Bell
from agent.mqtt.spool.lane import Entry
from agent.mqtt.spool.spool import Figures, Spool

# How often what is too old is looked for.
_EXPIRE_S = 10.0


class Keeper:
    """Owns an open spool. `arrived` is called when something new can be taken; `clock` is that of the spool."""

    def __init__(self, spool: Spool, clock: Callable[[], float], arrived: Callable[[], None] = lambda: None) -> None:
        self.spool, self._clock, self.arrived = spool, clock, arrived
        self._waiters: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._bell = Bell()
        self._thread = ThreadPoolExecutor(1, "spool")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sync."""
        self._task = asyncio.create_task(self._run(), name="spool")

    async def stop(self) -> None:
        """Make everything durable, and close the spool."""
        if self._task is not None:
            self._task.cancel()
            # What is under way on the thread ends first.
            await asyncio.wait([self._task])
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error
        await asyncio.get_running_loop().run_in_executor(self._thread, self.spool.close, self._clock())
        self._thread.shutdown()
        self._answer(self.spool.durable(), set(self.spool.lost()))

    def put(self, kind: str, stream: str, body: bytes, *, urgent: bool = False) -> int | None:
        """Take a message and wait for nothing; its position, or None where it was refused."""
        position = self.spool.append(kind, stream, body, self._clock(), urgent=urgent)
        self._bell.ring()
        return position

    async def append(self, kind: str, stream: str, body: bytes, *, urgent: bool = False) -> int | None:
        """Take a message; when this returns it is durable. None where it was refused, or could not be written."""
        position = self.put(kind, stream, body, urgent=urgent)
        if position is None:
            return None
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((position, waiter))
        return position if await waiter else None

    def connected(self) -> None:
        """See `Spool.connected`."""
        self.spool.connected()

    def live(self, most: int, after: int = -1) -> Sequence[Entry]:
        """See `Spool.live`."""
        entries = self.spool.live(most, self._clock(), after)
        self._bell.ring()
        return entries

    def replay(self, most: int, after: int = -1) -> Sequence[Entry]:
        """See `Spool.replay`."""
        return self.spool.replay(most, self._clock(), after)

    def delivered(self, position: int) -> None:
        """See `Spool.delivered`."""
        self.spool.delivered(position, self._clock())
        self._bell.ring()

    def rejected(self, position: int, reason: str) -> None:
        """See `Spool.rejected`."""
        self.spool.rejected(position, reason, self._clock())
        self._bell.ring()

    @property
    def figures(self) -> Figures:
        """See `Spool.figures`."""
        return self.spool.figures

    async def _run(self) -> None:
        expire_at = self._clock() + _EXPIRE_S
        while True:
            now = self._clock()
            if now >= expire_at:
                self.spool.expire(now)
                expire_at = now + _EXPIRE_S
            if self.spool.due(now):
                await self._work()
            else:
                sync_at = self.spool.next_sync_at()
                await self._bell.wait(min(expire_at, sync_at or expire_at) - self._clock())

    async def _work(self) -> None:
        work = self.spool.take(self._clock())
        if work is None:
            return
        running = asyncio.get_running_loop().run_in_executor(self._thread, work.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await running
            raise
        finally:
            if running.done():
                before = self.spool.durable()
                durable = self.spool.finish(work, self._clock())
                self._answer(durable, set(self.spool.lost()))
                if durable > before:
                    self.arrived()

    def _answer(self, durable: int, lost: set[int]) -> None:
        """Wake those whose messages are durable, or lost."""
        while self._waiters and self._waiters[0][0] <= durable:
            position, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(position not in lost)
