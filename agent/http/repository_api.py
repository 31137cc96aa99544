"""The model repository extension of the Open Inference Protocol, as Triton has it: index, load, unload.

Source: Triton `extension_model_repository.md`. A load that succeeds has an empty answer, and the model is ready then;
one that fails says why, and what ran before goes on.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from agent.errors import Reason, RefusedError
from agent.http.answers import SERVER, json
from agent.http.bodies import read_body
from agent.http.guard import CHANGED
from agent.http.strict_json import decode
from agent.repository import Repository
from targets.errors import TightfitError, did_you_mean

_MOST_BYTES = 64 << 10
_BODY_S = 10.0
# Of what the audit says.
_MOST_CHARACTERS = 500
# A load names another bundle by `bundle`; unloading what depends on a model means nothing where nothing does.
_LOAD, _UNLOAD = ("bundle",), ("unload_dependents",)


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ready: bool = False


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


class RepositoryApi:
    """Handlers over the repository."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_post("/v2/repository/index", self.index)
        app.router.add_post("/v2/repository/models/{model}/load", self.load)
        app.router.add_post("/v2/repository/models/{model}/unload", self.unload)

    async def index(self, request: web.Request) -> web.Response:
        wanted = await _body(request, _Index)
        listed = await self._repository.index()
        return json([each for each in listed if not wanted.ready or each["state"] == "READY"])

    async def load(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        bundle = _parameters(await _body(request, _Change), _LOAD).get("bundle")
        if not isinstance(bundle, str | None):
            raise RefusedError(Reason.BAD_REQUEST, f"parameter bundle is {bundle!r}"[:200], "it must be a path")
        if bundle is not None:
            request[CHANGED] = {"bundle": bundle[:_MOST_CHARACTERS]}
        try:
            await self._repository.load(name, bundle)
        except RefusedError:
            raise
        except TightfitError as error:
            raise RefusedError(Reason.BAD_REQUEST, f"failed to load {name!r}: {error.message}", error.hint) from None
        request[CHANGED] = self._loaded(name)
        return _done()

    def _loaded(self, name: str) -> dict[str, str]:
        """Which bundles the model is now, and their versions, for the audit."""
        entries = [each for each in self._repository.entries if each.name == name and each.active is not None]
        return {
            "bundle": ",".join(each.options.bundle for each in entries)[:_MOST_CHARACTERS],
            "version": ",".join(each.active.version for each in entries if each.active),
        }

    async def unload(self, request: web.Request) -> web.Response:
        _parameters(await _body(request, _Change), _UNLOAD)
        await self._repository.unload(request.match_info["model"])
        return _done()


async def _body(request: web.Request, kind: type[Any]) -> Any:
    """The request's body, which may be empty."""
    data = await read_body(request, _MOST_BYTES, _BODY_S)
    return decode(data, kind, "repository request") if data.strip() else kind()


def _parameters(change: _Change, known: tuple[str, ...]) -> dict[str, Any]:
    for name in change.parameters:
        if name not in known:
            raise RefusedError(Reason.BAD_REQUEST, f"unknown parameter {name[:100]!r}", did_you_mean(name[:100], known))
    return change.parameters


def _done() -> web.Response:
    return web.Response(headers=SERVER)
