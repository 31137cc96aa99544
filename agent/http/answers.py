"""Answers as the Open Inference Protocol has them: JSON, and `{"error": "..."}` for every error.

Clients index that key and fail without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from agent import log
from agent.errors import TABLE, Reason, RefusedError
from agent.http.bodies import EXPECTATION
from agent.http.echo import echoed
from targets.errors import ContractError, TightfitError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Instead of aiohttp's, which tells the versions of Python and of itself.
SERVER = {"Server": "tightfit-agent"}
_MAX_ERROR_CHARACTERS = 2000
_CONTINUE = "100-continue"
# What `OPTIONS *` asks of: the server as a whole.
_EVERY = {"*": "GET,HEAD,POST"}


class CutOffError(RefusedError):
    """The answer had begun when it failed: nothing more can be said on it."""

    def __init__(self, reason: Reason, message: str, response: web.StreamResponse) -> None:
        super().__init__(reason, message)
        self.response = response


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what handlers and the router raise into the protocol's error body."""
    response = await _answered(request, handler)
    if EXPECTATION in request:
        # Whoever waits to be told to send a body may send it now, or another request: nobody knows which.
        response.force_close()
    if request.content.exception() is not None:
        # Nobody knows where the next request begins.
        response.force_close()
    if request.method in ("GET", "HEAD"):
        # What is ready, loaded or counted now is not what a cache may answer later. Nobody keeps answers to POST.
        response.headers.setdefault("Cache-Control", "no-store")
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    expectation = request.get(EXPECTATION, _CONTINUE)
    if expectation.lower() != _CONTINUE:
        return json({"error": f"Expect: {expectation[:40]!r}; available: {_CONTINUE}"}, 417)
    try:
        return await handler(request)
    except (RefusedError, ContractError, ConnectionError) as error:
        # Nobody is there to read that the client went away.
        gone = Reason.DISCONNECTED, str(error)
        return refusal(*(gone if isinstance(error, ConnectionError) else judged(error)))
    except web.HTTPException as error:
        if request.method == "OPTIONS" and (methods := error.headers.get("Allow", _EVERY.get(request.raw_path))):
            return web.Response(status=204, headers={"Allow": f"{methods},OPTIONS", **SERVER})
        allow = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        hint = f"; allowed here: {allow['Allow']}" if allow else ""
        return json({"error": f"{error.reason}: {request.method} {request.path[:200]}{hint}"}, error.status, allow)
    except Exception as error:  # noqa: BLE001 - answered and logged; the server goes on
        log.get("http").exception("request failed", path=request.path[:200], **echoed(request.headers))
        return json({"error": f"the server failed: {type(error).__name__}"}, 500)


def judged(error: Exception) -> tuple[Reason, str]:
    """Why a request failed, and what is said of it. What is no error of the protocol's is a fault, to be logged."""
    if isinstance(error, RefusedError):
        return error.reason, str(error)
    if isinstance(error, TightfitError):
        return Reason.BAD_REQUEST, str(error)
    return Reason.FAULT, f"the server failed: {type(error).__name__}"


def refusal(reason: Reason, message: str, unread: bool = False, error: BaseException | None = None) -> web.Response:
    """Why a request is not answered with tensors: of `error`, where there is more to say. With `unread`, some of its
    body was not read."""
    answer = TABLE[reason]
    retry_after_s = error.retry_after_s if isinstance(error, RefusedError) else answer.retry_after_s
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if reason is Reason.UNAUTHENTICATED:
        # RFC 9110, section 11.6.1.
        headers["WWW-Authenticate"] = "Bearer"
    response = json({"error": message[:_MAX_ERROR_CHARACTERS]}, answer.status, headers)
    if unread or reason is Reason.DRAINING:
        # The rest of an unread body would be taken for the next request, or be waited for.
        response.force_close()
    return response


def json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """`value` as JSON."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers={"Content-Type": "application/json", **SERVER, **(headers or {})},
    )
