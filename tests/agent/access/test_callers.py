"""The decision: every kind of caller, role and scope; and what every endpoint needs."""

from __future__ import annotations

import itertools

import pytest

from agent.access.callers import EVERYBODY, NEEDS, NOBODY, Caller, Need, Role, Scope, anonymous, decide, need_of
from agent.errors import Reason


def caller(role: Role, *models: str) -> Caller:
    return Caller("somebody", {role: frozenset(models)})


@pytest.mark.parametrize(("has", "needs", "scope"), list(itertools.product(Role, Role, Scope)))
@pytest.mark.parametrize("models", [(), ("ocr",), ("det",), ("ocr", "det"), ("*",)])
def test_every_role_for_every_scope(has: Role, needs: Role, scope: Scope, models: tuple[str, ...]) -> None:
    granted = {Scope.MODEL: "ocr" in models or "*" in models, Scope.EVERY: "*" in models, Scope.ANY: bool(models)}
    allowed = has is needs and granted[scope]
    need = Need((needs,), scope)
    assert decide(caller(has, *models), need, "ocr") is (None if allowed else Reason.FORBIDDEN)
    if models == ("*",):
        stranger = anonymous([has])
        assert decide(stranger, need, "ocr") is (None if allowed else Reason.UNAUTHENTICATED)


def test_one_of_several_roles_is_enough() -> None:
    need = Need((Role.INFER, Role.OBSERVE), Scope.MODEL)
    for role, reason in ((Role.INFER, None), (Role.OBSERVE, None), (Role.ADMIN, Reason.FORBIDDEN)):
        assert decide(caller(role, "ocr"), need, "ocr") is reason


def test_everybody_and_nobody() -> None:
    for need in NEEDS.values():
        assert decide(EVERYBODY, need, "ocr") is None
        assert decide(NOBODY, need, "ocr") is (Reason.UNAUTHENTICATED if need.roles else None)
        assert decide(Caller("x", {}), need, "ocr") is (Reason.FORBIDDEN if need.roles else None)


def test_nobody_is_asked_only_by_probes() -> None:
    assert {path for path, need in NEEDS.items() if not need.roles} == {
        "GET /", "GET /v2/health/live", "GET /v2/health/ready", "GET /v2/models/{model}/ready",
    }  # fmt: skip


def test_what_changes_something_is_for_administrators() -> None:
    for path, need in NEEDS.items():
        changes = path.startswith("POST") and path.rsplit("/", 1)[1] in (
            "load", "unload", "setting", "logging", "register", "unregister",
        )  # fmt: skip
        assert (Role.ADMIN in need.roles) == changes, path


def test_paths_as_the_router_has_them() -> None:
    infer = Need((Role.INFER,), Scope.MODEL)
    assert need_of("POST", "/v2/models/{model}/infer") == infer
    assert need_of("POST", "/v2/models/{model}/versions/{version}/infer") == infer
    assert need_of("HEAD", "/metrics") == need_of("GET", "/metrics") == Need((Role.OBSERVE,))
    assert need_of("GET", "/v2/new") == need_of("DELETE", "/metrics") == Need((Role.ADMIN,))
