"""One task waits until others have something for it, or until it is time for something else."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes the task that waits for it; what rang while nobody waited is heard by the next wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        """End the wait, now or as soon as it begins."""
        self._rung = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float | None = None) -> None:
        """Until it rings, at most so long."""
        if not self._rung:
            self._waiter = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(max(seconds, 0), self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._rung = False
