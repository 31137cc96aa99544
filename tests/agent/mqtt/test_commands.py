"""What becomes of commands, decided without a broker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.access.callers import Role
from agent.errors import Reason
from agent.mqtt.commands import KEEP_S, Address, Command, Desk, Ignored, Reply
from agent.mqtt.packet import Incoming, Properties

OBSERVE, ADMIN = Address("observe", "ping"), Address("admin", "activate")
ACTIVATE = {"v": 1, "id": "k", "args": {"model": "m"}}


def desk(*changed: str, roles: tuple[Role, ...] = tuple(Role), per_s: float = 1000.0, burst: int = 1000) -> Desk:
    return Desk(roles, lambda topic: topic.startswith("edge/v1/d/"), 60.0, per_s, burst, 1000, changed)


def incoming(body: object, *, retain: bool = False, at: float = 0.0, **properties: Any) -> Incoming:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Incoming("t", payload, 1, retain, Properties(**properties), at)


def reason(reply: object) -> object:
    assert isinstance(reply, Reply)
    return reply.body["reason"]


def test_one_that_is_run_and_answered() -> None:
    at = desk()
    message = incoming({"v": 1, "id": "k"}, response_topic="edge/v1/d/x/res/y", correlation=b"c")
    command = at.receive(message, OBSERVE, 1.0)
    assert isinstance(command, Command)
    assert (command.verb, command.key, command.deadline, command.changes) == ("ping", "k", 60.0, False)
    assert at.accepted(command).body == {"id": "k", "verb": "ping", "state": "accepted"}
    reply = at.done(command, {"x": 1}, 2.0)
    assert reply.body == {"id": "k", "verb": "ping", "state": "done", "result": {"x": 1}}
    assert (reply.reply_to.topic, reply.reply_to.correlation) == ("edge/v1/d/x/res/y", b"c")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 900, b"x" * 1001, {"v": 2}, {"v": 1, "id": ""},
        {"v": 1, "id": "a" * 65}, {"v": 1, "id": "\u00e9"}, {"v": 1, "more": 1}, {"v": 1, "expiry_s": 0}, {"id": "k"},
    ],
)  # fmt: skip
def test_what_is_none_is_ignored(body: object) -> None:
    at = desk()
    assert isinstance(at.receive(incoming(body), OBSERVE, 0.0), Ignored)
    assert at.figures.ignored == 1
    assert at.figures.run == 0


def test_one_that_was_retained_is_ignored() -> None:
    assert isinstance(desk().receive(incoming({"v": 1}, retain=True), OBSERVE, 0.0), Ignored)


@pytest.mark.parametrize("topic", ["somewhere", "edge/v1/other/x/res/y"])
def test_answers_go_nowhere_else(topic: str) -> None:
    assert isinstance(desk().receive(incoming({"v": 1}, response_topic=topic), OBSERVE, 0.0), Ignored)
    assert isinstance(desk().receive(incoming({"v": 1, "response_topic": topic}), OBSERVE, 0.0), Ignored)


def test_what_mqtt_3_has_no_properties_for() -> None:
    body = {"v": 1, "response_topic": "edge/v1/d/x/res/y", "correlation": "c", "expiry_s": 5}
    command = desk().receive(incoming(body), OBSERVE, 0.0)
    assert isinstance(command, Command)
    assert (command.reply_to.topic, command.reply_to.correlation, command.deadline) == ("edge/v1/d/x/res/y", b"c", 5.0)


@pytest.mark.parametrize(
    ("address", "body", "wanted"),
    [
        (Address("observe", "pong"), {"v": 1}, Reason.BAD_REQUEST),
        (Address("observe", "activate"), ACTIVATE, Reason.FORBIDDEN),
        (Address("other", "ping"), {"v": 1}, Reason.FORBIDDEN),
        (ADMIN, {"v": 1, "args": {"model": "m"}}, Reason.BAD_REQUEST),
        (ADMIN, {"v": 1, "id": "k", "args": {"model": 1}}, Reason.BAD_REQUEST),
        (ADMIN, {"v": 1, "id": "k", "args": {"model": "m", "more": 1}}, Reason.BAD_REQUEST),
        (Address("admin", "configure"), {"v": 1, "id": "k", "args": {"telemetry_s": 0}}, Reason.BAD_REQUEST),
    ],
)
def test_refusals(address: Address, body: object, wanted: Reason) -> None:
    assert reason(desk().receive(incoming(body), address, 0.0)) == wanted.value


def test_roles_that_are_not_served() -> None:
    assert reason(desk(roles=(Role.OBSERVE,)).receive(incoming(ACTIVATE), ADMIN, 0.0)) == Reason.FORBIDDEN.value


def test_the_same_twice_is_done_once() -> None:
    at = desk()
    command = at.receive(incoming(ACTIVATE), ADMIN, 0.0)
    assert isinstance(command, Command)
    meanwhile = at.receive(incoming(ACTIVATE, correlation=b"2"), ADMIN, 1.0)
    assert isinstance(meanwhile, Reply)
    assert (meanwhile.body["state"], meanwhile.body["repeated"]) == ("accepted", True)
    assert meanwhile.reply_to.correlation == b"2"
    at.done(command, {"x": 1}, 2.0)
    later = at.receive(incoming(ACTIVATE), ADMIN, 3.0)
    assert isinstance(later, Reply)
    assert (later.body["state"], later.body["result"], later.body["repeated"]) == ("done", {"x": 1}, True)
    assert at.figures.run == 1


def test_an_id_of_another_command_is_refused() -> None:
    at = desk()
    at.receive(incoming(ACTIVATE), ADMIN, 0.0)
    assert reason(at.receive(incoming({**ACTIVATE, "args": {"model": "n"}}), ADMIN, 0.0)) == Reason.BAD_REQUEST.value


def test_what_changed_something_is_not_done_again_after_a_restart() -> None:
    before = desk()
    assert isinstance(before.receive(incoming(ACTIVATE), ADMIN, 0.0), Command)
    assert before.changed == ["k"]
    again = desk(*before.changed).receive(incoming(ACTIVATE), ADMIN, 0.0)
    assert isinstance(again, Reply)
    assert again.body["repeated"] is True


def test_answers_are_forgotten_in_time_and_by_number() -> None:
    at = desk()
    for number in range(1000):
        command = at.receive(incoming({"v": 1, "id": f"k{number}"}), OBSERVE, 0.0)
        assert isinstance(command, Command)
        at.done(command, "x" * 10_000, 0.0)
    assert isinstance(at.receive(incoming({"v": 1, "id": "k0"}), OBSERVE, 1.0), Command)
    assert isinstance(at.receive(incoming({"v": 1, "id": "k999"}), OBSERVE, 1.0), Reply)
    late = incoming({"v": 1, "id": "k999"}, at=KEEP_S + 1.0)
    assert isinstance(at.receive(late, OBSERVE, KEEP_S + 1.0), Command)


@pytest.mark.parametrize("body", [{"v": 1}, {"v": 1, "expiry_s": 30}])
def test_one_that_is_too_old_is_not_done(body: object) -> None:
    """By our own clock since it came; the broker has taken off what it waited there."""
    at = desk()
    assert isinstance(at.receive(incoming(body, at=0.0, expiry_s=10), OBSERVE, 9.9), Command)
    late = at.receive(incoming(body, at=0.0, expiry_s=10), OBSERVE, 10.0)
    assert isinstance(late, Reply)
    assert late.body["state"] == "expired"
    assert at.figures.expired == 1


def test_a_verb_has_a_rate() -> None:
    at = desk(per_s=1.0, burst=2)
    found = [at.receive(incoming({"v": 1}), OBSERVE, 0.0) for _ in range(3)]
    assert [isinstance(each, Command) for each in found] == [True, True, False]
    assert reason(found[2]) == Reason.RATE_LIMITED.value
    assert isinstance(at.receive(incoming({"v": 1}), Address("observe", "models"), 0.0), Command)
    assert isinstance(at.receive(incoming({"v": 1}), OBSERVE, 1.0), Command)


def test_failures_say_why() -> None:
    at = desk()
    command = at.receive(incoming(ACTIVATE), ADMIN, 0.0)
    assert isinstance(command, Command)
    assert at.failed(command, Reason.UNKNOWN_MODEL, "unknown model 'm'", 1.0, "n?").body == {
        "id": "k", "verb": "activate", "state": "failed", "reason": "unknown_model", "code": 0x90,
        "error": "unknown model 'm'", "hint": "n?",
    }  # fmt: skip
