"""The statistics extension of the Open Inference Protocol, as Triton has it (`extension_statistics.md`)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from agent.errors import Reason, RefusedError
from agent.http.answers import json
from agent.http.ensembles import EnsembleApi
from agent.repository import Repository, no_version
from agent.statistics import Statistics

Counted = tuple[str, str, Statistics]
"""A model, its version, and what that has done."""


class StatisticsApi:
    """What all versions have done, or those of one model, or one."""

    def __init__(self, repository: Repository, ensembles: EnsembleApi) -> None:
        self._repository, self._ensembles = repository, ensembles

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/v2/models/stats", self.all)
        app.router.add_get("/v2/models/{model}/stats", self.model)
        app.router.add_get("/v2/models/{model}/versions/{version}/stats", self.model)

    async def all(self, _: web.Request) -> web.Response:
        return _answer([*self._served(), *self._ensembles.statistics()])

    async def model(self, request: web.Request) -> web.Response:
        name, version = request.match_info["model"], request.match_info.get("version")
        if self._ensembles.find(request):
            counted = [each for each in self._ensembles.statistics() if each[0] == name]
        else:
            self._repository.find(name, version)
            counted = [each for each in self._served() if each[0] == name]
        if not counted:
            raise RefusedError(Reason.MODEL_NOT_READY, f"model {name!r} is not loaded now")
        found = [each for each in counted if version in (None, each[1])]
        if not found:
            raise no_version(name, str(version), [each[1] for each in counted])
        return _answer(found)

    def _served(self) -> list[Counted]:
        active = [entry.active for entry in self._repository.entries if entry.active]
        return [(served.name, served.version, served.statistics) for served in active]


def _answer(counted: list[Counted]) -> web.Response:
    shown: list[dict[str, Any]] = [statistics.shown(name, version) for name, version, statistics in counted]
    return json({"model_stats": shown})
