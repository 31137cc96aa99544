"""Who asks, and what he may: a caller, his roles for models, and the decision. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.errors import Reason


class Role(str, enum.Enum):
    """What one may do: ask models, look at what goes on, or change it. No role contains another."""

    INFER = "infer"
    OBSERVE = "observe"
    ADMIN = "admin"


EVERY = "*"
"""Stands for all models, also those that come later, and for what concerns no model alone."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`grants` are the models by role. One who is not `known` is anonymous, and has no name."""

    name: str
    grants: Mapping[Role, frozenset[str]]
    known: bool = True

    def may(self, role: Role, model: str = EVERY) -> bool:
        """Whether he has the role for that model, or for all."""
        granted = self.grants.get(role, ())
        return EVERY in granted or model in granted

    def may_somewhere(self, role: Role) -> bool:
        """Whether he has the role for any model."""
        return bool(self.grants.get(role))


def anonymous(roles: Iterable[Role]) -> Caller:
    """Somebody of whom nothing is known, with these roles for all models."""
    return Caller("", {role: frozenset({EVERY}) for role in roles}, known=False)


EVERYBODY = anonymous(Role)
NOBODY = anonymous(())


class Scope(enum.Enum):
    """Of which models a role is needed."""

    MODEL = "the one that is asked for"
    EVERY = "all"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Need:
    """One of these roles is needed; none at all where there are none."""

    roles: tuple[Role, ...] = ()
    scope: Scope = Scope.EVERY


def decide(caller: Caller, need: Need, model: str = "") -> Reason | None:
    """Why he may not; None: he may. Who is known is not asked who he is."""
    if not need.roles or any(_has(caller, role, need.scope, model) for role in need.roles):
        return None
    return Reason.FORBIDDEN if caller.known else Reason.UNAUTHENTICATED


def _has(caller: Caller, role: Role, scope: Scope, model: str) -> bool:
    if scope is Scope.ANY:
        return caller.may_somewhere(role)
    return caller.may(role, model if scope is Scope.MODEL else EVERY)


# --- what endpoints need

_OPEN = Need()
_ASK = Need((Role.INFER,), Scope.MODEL)
_KNOW = Need((Role.INFER, Role.OBSERVE), Scope.MODEL)
_KNOW_OF_ANY = Need((Role.INFER, Role.OBSERVE), Scope.ANY)
_LOOK = Need((Role.OBSERVE,), Scope.MODEL)
_LOOK_AT_ALL = Need((Role.OBSERVE,))
_CHANGE = Need((Role.ADMIN,), Scope.MODEL)
_CHANGE_ALL = Need((Role.ADMIN,))

_MODEL = "/v2/models/{model}"
NEEDS: Mapping[str, Need] = {
    # Whoever asks whether it is well is a probe, and has no secrets. The page is empty without /v2/status.
    "GET /v2/health/live": _OPEN,
    "GET /v2/health/ready": _OPEN,
    f"GET {_MODEL}/ready": _OPEN,
    "GET /": _OPEN,
    "GET /v2": _KNOW_OF_ANY,
    "GET /v2/openapi.json": _KNOW_OF_ANY,
    f"GET {_MODEL}": _KNOW,
    f"GET {_MODEL}/config": _KNOW,
    f"POST {_MODEL}/infer": _ASK,
    f"POST {_MODEL}/image": _ASK,
    f"POST {_MODEL}/stream": _ASK,
    f"POST {_MODEL}/generate": _ASK,
    f"POST {_MODEL}/generate_stream": _ASK,
    f"GET {_MODEL}/results": _LOOK,
    f"GET {_MODEL}/results/picture": _LOOK,
    f"GET {_MODEL}/stats": _LOOK,
    f"GET {_MODEL}/trace/setting": _LOOK,
    "GET /metrics": _LOOK_AT_ALL,
    "GET /v2/status": _LOOK_AT_ALL,
    "GET /v2/events": _LOOK_AT_ALL,
    "GET /v2/models/stats": _LOOK_AT_ALL,
    "POST /v2/repository/index": _LOOK_AT_ALL,
    "GET /v2/trace/setting": _LOOK_AT_ALL,
    "GET /v2/logging": _LOOK_AT_ALL,
    "GET /v2/systemsharedmemory/status": _LOOK_AT_ALL,
    "GET /v2/cudasharedmemory/status": _LOOK_AT_ALL,
    "GET /v2/systemsharedmemory/region/{region}/status": _LOOK_AT_ALL,
    "GET /v2/cudasharedmemory/region/{region}/status": _LOOK_AT_ALL,
    "POST /v2/repository/models/{model}/load": _CHANGE,
    "POST /v2/repository/models/{model}/unload": _CHANGE,
    f"POST {_MODEL}/trace/setting": _CHANGE,
    "POST /v2/trace/setting": _CHANGE_ALL,
    "POST /v2/logging": _CHANGE_ALL,
    **{
        f"POST /v2/{kind}sharedmemory/{change}": _CHANGE_ALL
        for kind in ("system", "cuda")
        for change in ("unregister", "region/{region}/register", "region/{region}/unregister")
    },
}
"""By method and path. A version of a model needs what the model does."""


def need_of(method: str, path: str) -> Need:
    """Of a path as the router has it, with names in braces. What the table lacks is for administrators."""
    method = "GET" if method == "HEAD" else method
    return NEEDS.get(f"{method} {path.replace('/versions/{version}', '')}", _CHANGE_ALL)
