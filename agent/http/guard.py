"""Asks of every request that aiohttp serves who sent it, and whether he may; the fast lane asks the same of its own."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from agent.access.access import Access
from agent.access.audit import name_of
from agent.access.callers import NOBODY, Caller, Need, Role, decide, need_of
from agent.access.origins import is_foreign
from agent.errors import Reason, RefusedError
from agent.gateway import Gateway
from agent.http.answers import Handler, judged, refusal
from agent.http.bodies import DROPPED_BYTES
from agent.http.echo import echoed

CALLER = "caller"
"""Entry of a request for who asks."""
CHANGED = "changed"
"""Entry of a request for what the audit says of it beside its model: names and values."""


def guard_of(access: Access, gateway: Gateway) -> Middleware:
    """The middleware that lets nobody do what he may not."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:
            # No such path, or no such method of it.
            return await handler(request)
        need = need_of(request.method, resource.canonical)
        caller = NOBODY
        try:
            _check_origin(request)
            if need.roles:
                caller = request[CALLER] = access.caller(request.transport, _authorization(request))
                _check(caller, need, request.match_info.get("model", ""))
        except RefusedError as error:
            _refused(access, gateway, request, need, caller, error)
            return refusal(error.reason, str(error), unread=much_is_unread(request))
        if Role.ADMIN not in need.roles:
            return await handler(request)
        return await _audited(access, request, handler, caller)

    return guard


def why_no_longer(access: Access, request: web.Request) -> RefusedError | None:
    """Why whoever was let in may not go on with what he began, where he may not."""
    resource = request.match_info.route.resource
    if resource is None or request.transport is None:
        return None
    need = need_of(request.method, resource.canonical)
    try:
        if need.roles:
            _check(access.caller(request.transport, _authorization(request)), need, request.match_info.get("model", ""))
    except RefusedError as error:
        return error
    return None


def client_of(request: web.Request) -> str:
    """Whom limits and turns are counted for: a caller by his name, others by their address."""
    caller: Caller | None = request.get(CALLER)
    return caller.name if caller is not None and caller.known else request.remote or ""


def much_is_unread(request: web.Request) -> bool:
    """Whether so much of the body has not been read, or nobody knows how much, that the connection is better closed."""
    length = request.content_length
    return not request.content.is_eof() and (length is None or length > DROPPED_BYTES)


def _authorization(request: web.Request) -> str | None:
    found = request.headers.getall("Authorization", [])
    if len(found) > 1:
        raise RefusedError(Reason.UNAUTHENTICATED, "several headers Authorization", "send one")
    return found[0] if found else None


def _check_origin(request: web.Request) -> None:
    origins = request.headers.getall("Origin", [])
    if is_foreign(origins, request.headers.getall("Host", [])):
        raise RefusedError(
            Reason.FORBIDDEN,
            f"the header Origin, {', '.join(origins)[:100]!r}, says that a page of another site asks",
            "ask from a program, or from a page whose address has the host and port that Host has",
        )


def _check(caller: Caller, need: Need, model: str) -> None:
    reason = decide(caller, need, model)
    if reason is None:
        return
    role = " or ".join(each.value for each in need.roles)
    if reason is Reason.FORBIDDEN:
        raise RefusedError(reason, f"caller {caller.name!r} lacks the role {role} for this")
    raise RefusedError(
        reason, f"this needs the role {role}, and nobody knows who asks", "send a token, or show a certificate"
    )


def _refused(
    access: Access, gateway: Gateway, request: web.Request, need: Need, caller: Caller, error: RefusedError
) -> None:
    if need.roles == (Role.INFER,):
        # It counts as what it is: a request that was refused.
        call = gateway.open(client_of(request))
        call.echo = echoed(request.headers)
        gateway.settle(call, error.reason, str(error))
    if Role.ADMIN in need.roles:
        access.audit.refused(_what(request), name_of(caller), _where(request), error.reason.value, **_model(request))


async def _audited(access: Access, request: web.Request, handler: Handler, caller: Caller) -> web.StreamResponse:
    def write(outcome: str) -> None:
        access.audit.done(
            _what(request), name_of(caller), _where(request), outcome, **_model(request), **request.get(CHANGED, {})
        )

    try:
        response = await handler(request)
    except web.HTTPException as error:
        write(str(error.status))
        raise
    except Exception as error:
        write(judged(error)[0].value)
        raise
    write("done" if response.status < 400 else str(response.status))
    return response


def _what(request: web.Request) -> str:
    """The last of the path: load, unload, setting, logging, register ..."""
    return request.path.rsplit("/", 1)[1][:40]


def _where(request: web.Request) -> str:
    return request.remote or "unix"


def _model(request: web.Request) -> dict[str, str]:
    return {"model": request.match_info["model"][:100]} if "model" in request.match_info else {}
