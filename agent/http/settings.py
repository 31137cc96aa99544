"""Endpoints of Triton's trace, logging and shared-memory extensions: they say what there is, and change nothing.

Sources: Triton `extension_trace.md`, `extension_logging.md`, `extension_shared_memory.md`. A request that would leave
all as it is succeeds; one that would not has the protocol's error, so that no client takes it for done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from agent.config import Log
from agent.errors import Reason, RefusedError
from agent.http.answers import json
from agent.http.bodies import read_body
from agent.http.ensembles import EnsembleApi
from agent.http.strict_json import decode
from agent.repository import Repository
from targets.errors import did_you_mean

_MOST_BYTES = 64 << 10
_BODY_S = 10.0
_LEVELS = ("error", "warning", "info", "debug")
# Nothing is traced as Triton does it: spans are configured under [tracing], and a traceparent is echoed and logged.
_TRACE = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip


class SettingsApi:
    """Handlers of what cannot be set while the agent runs."""

    def __init__(self, repository: Repository, ensembles: EnsembleApi, log: Log) -> None:
        self._repository, self._ensembles = repository, ensembles
        shown = _LEVELS.index(log.level)
        self._logging = {
            "log_file": "", "log_info": shown >= 2, "log_warning": shown >= 1, "log_error": True,
            "log_verbose_level": int(shown >= 3), "log_format": "ISO8601",
        }  # fmt: skip

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
            app.router.add_get(path, self.trace)
            app.router.add_post(path, self.set_trace)
        app.router.add_get("/v2/logging", self.logging)
        app.router.add_post("/v2/logging", self.set_logging)
        for kind in ("system", "cuda"):
            app.router.add_get(f"/v2/{kind}sharedmemory/status", self.regions)
            app.router.add_get(f"/v2/{kind}sharedmemory/region/{{region}}/status", self.region)
            app.router.add_post(f"/v2/{kind}sharedmemory/unregister", self.share)
            for change in ("register", "unregister"):
                app.router.add_post(f"/v2/{kind}sharedmemory/region/{{region}}/{change}", self.share)

    async def trace(self, request: web.Request) -> web.Response:
        self._check_model(request)
        return json(_TRACE)

    async def set_trace(self, request: web.Request) -> web.Response:
        self._check_model(request)
        return await _unchanged(request, _TRACE, "requests are not traced here")

    async def logging(self, _: web.Request) -> web.Response:
        return json(self._logging)

    async def set_logging(self, request: web.Request) -> web.Response:
        return await _unchanged(request, self._logging, "what is logged is configured by level under [log]")

    async def regions(self, _: web.Request) -> web.Response:
        return json([])

    async def region(self, request: web.Request) -> web.Response:
        region = request.match_info["region"]
        raise RefusedError(Reason.BAD_REQUEST, f"no shared memory region {region[:100]!r}", "there are none here")

    async def share(self, _: web.Request) -> web.Response:
        raise RefusedError(
            Reason.BAD_REQUEST, "shared memory is not supported", "send tensors as raw bytes, or over a stream"
        )

    def _check_model(self, request: web.Request) -> None:
        if "model" in request.match_info and not self._ensembles.find(request):
            self._repository.find(request.match_info["model"])


async def _unchanged(request: web.Request, settings: Mapping[str, Any], why: str) -> web.Response:
    """The settings, unless the request asks for others; null stands for what holds anyway."""
    body = await read_body(request, _MOST_BYTES, _BODY_S)
    wanted = decode(body, dict[str, Any], "request for settings") if body.strip() else {}
    for name, value in wanted.items():
        if name not in settings:
            raise RefusedError(
                Reason.BAD_REQUEST, f"unknown setting {name[:100]!r}", did_you_mean(name[:100], settings)
            )
        if value is not None and (type(value), value) != (type(settings[name]), settings[name]):
            now = msgspec.json.encode(settings[name]).decode()
            raise RefusedError(Reason.BAD_REQUEST, f"{name} is {now}, and cannot be set", why)
    return json(settings)
