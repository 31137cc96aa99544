"""Handlers of the page and of its figures."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from agent.config import Config
from agent.gateway import Gateway
from agent.http.answers import SERVER, json
from agent.memory import mem_total_bytes
from agent.models import machine_budget
from agent.page.document import document
from agent.page.memory import Meter
from agent.page.recent import EVERY_S, Counted, Recent
from agent.page.status import (
    Degraded,
    Status,
    last_refusal,
    latency_of,
    memory_of,
    misses_in,
    model_of,
    refused_for,
    state_of,
    summed,
)
from agent.repository import Repository
from agent.served import Entry


class PageApi:
    """The page at `/`, and `/v2/status`."""

    def __init__(self, gateway: Gateway, repository: Repository, config: Config, version: str) -> None:
        self._gateway, self._repository, self._version = gateway, repository, version
        self._total, self._budget = mem_total_bytes(), machine_budget(config.memory.os_reserve_mib)
        self._epoch = gateway.journal.feed.results.epoch
        self._began, self._started_s = time.monotonic(), time.time()
        self._recent = Recent(self._began)
        self._meter = Meter(lambda: [(each.name, each.engine.pid) for each in gateway.served])
        self._timer: asyncio.TimerHandle | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/", self.page)
        app.router.add_get("/v2/status", self.status)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._close)

    async def page(self, request: web.Request) -> web.Response:
        """Always HTML, whatever is accepted: what programs read is at /v2/status."""
        page = document()
        if any(each.value in ("*", page.etag.strip('"')) for each in request.if_none_match or ()):
            kept = {name: value for name, value in page.headers.items() if name != "Content-Type"}
            return web.Response(status=304, headers={**kept, **SERVER})
        return web.Response(body=page.body, headers={**page.headers, **SERVER})

    async def status(self, _: web.Request) -> web.Response:
        """The agent at one glance."""
        return json(await self.current())

    async def current(self) -> Status:
        """The same, for whoever is in this process."""
        measured = await self._meter.read()
        gateway, entries, now = self._gateway, self._repository.entries, time.monotonic()
        counted = self._counted()
        recent, window_s = self._recent.since(counted, now)
        step = gateway.overload.step
        level = gateway.overload.level
        state, why = state_of(entries, gateway.draining, level, step.name)
        return Status(
            name="tightfit-agent",
            version=self._version,
            epoch=self._epoch,
            state=state,
            why=why,
            started_s=self._started_s,
            at_s=time.time(),
            uptime_s=now - self._began,
            degradation=Degraded(level, step.name, gateway.overload.cause),
            models=[
                model_of(each, gateway.queue_of(each.active) if each.active else (0, 0), recent) for each in entries
            ],
            memory=memory_of(gateway.served, measured, now, self._total, self._budget),
            window_s=window_s,
            latency=latency_of(summed(recent.answered.values())),
            answered=sum(map(sum, counted.answered.values())),
            misses=misses_in(recent),
            refusals=refused_for(counted, recent),
            last_refusals=[last_refusal(each) for each in gateway.refusals.newest()],
        )

    def _queue_of(self, entry: Entry) -> tuple[int, int]:
        return self._gateway.queue_of(entry.active) if entry.active else (0, 0)

    def _counted(self) -> Counted:
        return Counted(self._gateway.telemetry.answered(), self._gateway.telemetry.refused())

    async def _start(self, _: web.Application) -> None:
        self._look()

    def _look(self) -> None:
        self._recent.look(self._counted(), time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look)

    async def _close(self, _: web.Application) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._meter.close()
