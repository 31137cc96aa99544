"""Reloads on a signal: the configuration is read again, and the models become what it says.

One goes on at a time, and one more is remembered: signals that come meanwhile ask for what that one does anyway. The
service manager hears of each (sd_notify(3), Type=notify-reload): RELOADING=1 with the time, and READY=1 at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from agent import log, systemd
from agent.access.access import Access
from agent.config import Config
from agent.repository import Repository
from targets.errors import TightfitError

Source = Callable[[], Config]

# What a reload puts into effect; everything else does a restart.
_MODELS = ("bundle", "models")
_ACCESS = ("access", "callers")


class Reloads:
    """Brings the repository to what `source` reads, whenever it is asked."""

    def __init__(self, config: Config, source: Source, access: Access, repository: Repository) -> None:
        self._config, self._source, self._access, self._repository = config, source, access, repository
        self._log = log.get("reload")
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Reload, or once more when that goes on."""
        self._asked.set()

    def begin(self) -> None:
        """From now on do as asked."""
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def close(self) -> None:
        """Do no more; a reload that goes on is given up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _serve(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                failed = await self._reload()
            except Exception:  # noqa: BLE001 - what runs goes on
                self._log.exception("the reload failed")
                failed = ["the reload failed: see the log"]
            systemd.notify("READY=1\nSTATUS=" + ("; ".join(failed) if failed else "reloaded"))

    async def _reload(self) -> list[str]:
        """What failed, a line each."""
        started = time.monotonic()
        try:
            config = self._source()
        except TightfitError as error:
            self._log.error("not reloaded: the configuration is not valid", error=str(error))
            self._access.audit.done("reload", "a signal", "this machine", "failed")
            return [str(error)]
        fixed = [
            name
            for name in config.__struct_fields__
            if name not in (*_MODELS, *_ACCESS) and getattr(config, name) != getattr(self._config, name)
        ]
        if fixed:
            self._log.warning("these sections take effect when the agent is started again", sections=",".join(fixed))
        failed = [*self._access.reload(config), *await self._repository.reload(config.served)]
        self._access.audit.done("reload", "a signal", "this machine", "failed" if failed else "done")
        self._log.info("reloaded", failed=len(failed), seconds=round(time.monotonic() - started, 3))
        return failed
