"""Commands that come over MQTT: which are run, which are answered at once, and which are nothing. Pure.

Theory of operation. A command comes on PREFIX/v1/DEVICE/ROLE/cmd/VERB; who may write there the broker decides, and the
role is what a verb needs. What is no command (it was kept by the broker, it is no JSON, of another version, too large)
is ignored with a line for the log and changes nothing; what is one is answered, whatever becomes of it:

    received --> refused (role, rate, unknown, not valid) | expired
             --> accepted --> done | failed
             --> a key that is known: the answer that there was, or that it is still being done

A command has a key, which whoever sends it twice keeps: it is done once. Answers are kept for `KEEP_S`, and no more
than so many; keys of commands that change something are remembered longer (`changed`), over restarts too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from agent.access.callers import Role
from agent.errors import TABLE, Reason
from agent.limits.rates import Rates
from agent.mqtt.packet import Incoming
from targets.errors import did_you_mean

VERSION = 1
# An answer is for whoever asks again because the first was lost on the way.
KEEP_S = 3600.0
_KEEP_ANSWERS, _KEEP_BYTES = 256, 1 << 20
_KEEP_CHANGES = 1024
_KEY_MOST = 64

_Key = Annotated[str, Meta(min_length=1, max_length=_KEY_MOST, pattern=r"^[!-~]*$")]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of verbs that need none."""


class Activate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load a model anew, or another `bundle` of the configured folders as that model."""

    model: _Name
    bundle: _Name | None = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go back to the bundle that the model had before the last command that activated another."""

    model: _Name


class Configure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be set until the next restart."""

    telemetry_s: Annotated[float, Meta(ge=1, le=86_400)] | None = None
    device_s: Annotated[float, Meta(ge=1, le=86_400)] | None = None


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next result of a model, if one comes within `wait_s`, with the digest of its input."""

    model: _Name
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 5.0


class Infer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of the Open Inference Protocol, as JSON."""

    model: _Name
    request: msgspec.Raw


class Verb(NamedTuple):
    """What a command needs, and whether it changes something."""

    role: Role
    arguments: type[msgspec.Struct]
    changes: bool = False


VERBS: dict[str, Verb] = {
    "ping": Verb(Role.OBSERVE, NoArguments),
    "models": Verb(Role.OBSERVE, NoArguments),
    "config": Verb(Role.OBSERVE, NoArguments),
    "snapshot": Verb(Role.OBSERVE, Snapshot),
    "infer": Verb(Role.INFER, Infer),
    "activate": Verb(Role.ADMIN, Activate, changes=True),
    "rollback": Verb(Role.ADMIN, Rollback, changes=True),
    "configure": Verb(Role.ADMIN, Configure, changes=True),
}


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command's payload. The last three stand in for what MQTT 3.1.1 has no properties for."""

    v: int
    id: _Key | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")
    expiry_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    response_topic: Annotated[str, Meta(max_length=1024)] = ""
    correlation: Annotated[str, Meta(max_length=256)] = ""
    traceparent: Annotated[str, Meta(max_length=128)] = ""


_decoder = msgspec.json.Decoder(_Body)


class Address(NamedTuple):
    """Where a command came in."""

    role: str
    verb: str


class ReplyTo(NamedTuple):
    """Where an answer goes, which is a topic of its own or that of role and verb, and what tells whose it is."""

    role: str
    verb: str
    topic: str = ""
    correlation: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True)
class Command:
    """One to be run until `deadline` (of the monotonic clock)."""

    verb: str
    key: str
    arguments: Any
    deadline: float
    reply_to: ReplyTo
    changes: bool = False


@dataclass(frozen=True)
class Reply:
    """An answer to be sent now; nothing is run."""

    reply_to: ReplyTo
    body: dict[str, object]


@dataclass(frozen=True)
class Ignored:
    """Nothing to do, but a line for the log."""

    why: str


class Figures(NamedTuple):
    """Since the start."""

    run: int
    answered_again: int
    refused: int
    expired: int
    ignored: int


@dataclass
class _Known:
    """A key that came: what it was about, and the answer once there is one."""

    verb: str
    arguments: bytes
    at: float
    body: dict[str, object] | None = None
    nbytes: int = 0


class Desk:
    """Decides about what comes. `roles` are those that are served; `may_answer_at` says of a response topic whether it
    is one of this device's; `changed` are keys of commands that changed something before this start."""

    def __init__(
        self,
        roles: Collection[Role],
        may_answer_at: Callable[[str], bool],
        expiry_s: float,
        per_s: float,
        burst: int,
        most_bytes: int,
        changed: Iterable[str] = (),
    ) -> None:
        self._may_answer_at = may_answer_at
        self._roles, self._expiry_s, self._most_bytes = frozenset(roles), expiry_s, most_bytes
        self._rates = Rates(per_s, burst, 0)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._changed: OrderedDict[str, None] = OrderedDict.fromkeys(list(changed)[-_KEEP_CHANGES:])
        self._nbytes = 0
        self._counts = dict.fromkeys(Figures._fields, 0)

    @property
    def figures(self) -> Figures:
        return Figures(**self._counts)

    @property
    def changed(self) -> list[str]:
        """Keys of commands that changed something, oldest first: to be remembered over restarts."""
        return list(self._changed)

    def receive(self, message: Incoming, address: Address, now: float) -> Command | Reply | Ignored:
        """What to do with it."""
        decided = self._receive(message, address, now)
        if isinstance(decided, Ignored):
            self._counts["ignored"] += 1
        return decided

    def _receive(self, message: Incoming, address: Address, now: float) -> Command | Reply | Ignored:
        body = "the broker had kept it: commands are not retained" if message.retain else self._body(message.payload)
        if isinstance(body, str):
            return Ignored(body)
        topic = message.properties.response_topic or body.response_topic
        if topic and not self._may_answer_at(topic):
            return Ignored("its response topic is none of this device's: PREFIX/v1/DEVICE/COMPONENT/res/NAME")
        return self._judge(message, body, address, topic, now)

    def _judge(self, message: Incoming, body: _Body, address: Address, topic: str, now: float) -> Command | Reply:
        """Of a command, whether it may be done."""
        correlation = message.properties.correlation or body.correlation.encode()
        reply_to = ReplyTo(*address, topic, correlation[:256], body.traceparent)
        verb = VERBS.get(address.verb)
        key = body.id or correlation.hex()[:_KEY_MOST]
        if verb is None:
            return self._refuse(
                reply_to, key, address.verb, Reason.BAD_REQUEST, f"there is no command {address.verb[:40]!r}",
                did_you_mean(address.verb[:40], VERBS),
            )  # fmt: skip
        if verb.role not in self._roles or address.role != verb.role.value:
            why = f"{address.verb} needs the role {verb.role.value}: " + (
                "it is not among commands under [mqtt]" if verb.role not in self._roles else "send it to that component"
            )
            return self._refuse(reply_to, key, address.verb, Reason.FORBIDDEN, why)
        if known := self._again(key, address.verb, bytes(body.args), reply_to, now):
            return known
        return self._begin(message, body, verb, Command(address.verb, key, None, 0.0, reply_to, verb.changes), now)

    def _begin(self, message: Incoming, body: _Body, verb: Verb, command: Command, now: float) -> Command | Reply:
        """One that was not there before."""
        refuse = (command.reply_to, command.key, command.verb)
        if verb.changes and not command.key:
            return self._refuse(*refuse, Reason.BAD_REQUEST, f"{command.verb} changes something: give it an id")
        # The broker took off what it waited there (MQTT 5.0, 3.3.2.3.3); from when it came on it is our clock.
        allowed = [each for each in (message.properties.expiry_s, body.expiry_s) if each is not None]
        deadline = message.at + min([self._expiry_s, *allowed])
        if now >= deadline:
            return self.expired(command)
        if wait_s := self._rates.wait_s(command.verb, now):
            return self._refuse(*refuse, Reason.RATE_LIMITED, f"{command.verb} comes too often", f"again in {wait_s} s")
        try:
            arguments = msgspec.json.decode(body.args, type=verb.arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return self._refuse(*refuse, Reason.BAD_REQUEST, f"args of {command.verb}: {error}")
        if command.key:
            self._know(command, bytes(body.args), now)
        self._counts["run"] += 1
        return replace(command, arguments=arguments, deadline=deadline)

    def done(self, command: Command, result: object, now: float) -> Reply:
        """It was done, and this came of it."""
        return self._answer(command, {"state": "done", "result": result}, now)

    def failed(self, command: Command, reason: Reason, message: str, now: float, hint: str = "") -> Reply:
        """It could not be done."""
        return self._answer(command, {"state": "failed", **_why(reason, message, hint)}, now)

    def expired(self, command: Command) -> Reply:
        """It is too old to be done."""
        self._counts["expired"] += 1
        said = {"state": "expired", **_why(Reason.DEADLINE, "it is older than it may be")}
        return Reply(command.reply_to, {"id": command.key, "verb": command.verb, **said})

    def accepted(self, command: Command) -> Reply:
        """That it is being done, for who waits for it."""
        return Reply(command.reply_to, {"id": command.key, "verb": command.verb, "state": "accepted"})

    def _body(self, payload: bytes) -> _Body | str:
        """A command, or why it is none."""
        if not payload:
            return "it is empty"
        if len(payload) > self._most_bytes:
            return f"it has {len(payload)} bytes, and may have {self._most_bytes}"
        try:
            body = _decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return f"it is no command: {str(error)[:200]}"
        if body.v != VERSION:
            return f"it is of version {body.v}, and version {VERSION} is known"
        return body

    def _again(self, key: str, verb: str, arguments: bytes, reply_to: ReplyTo, now: float) -> Reply | None:
        """The answer to a key that came before."""
        self._forget(now)
        known = self._known.get(key) if key else None
        if known is None:
            if key not in self._changed:
                return None
            self._counts["answered_again"] += 1
            # Before this start: it was begun, and nobody knows any more what came of it.
            return Reply(reply_to, {"id": key, "verb": verb, "state": "accepted", "repeated": True})
        if (known.verb, known.arguments) != (verb, arguments):
            return self._refuse(reply_to, key, verb, Reason.BAD_REQUEST, "this id was another command's")
        self._counts["answered_again"] += 1
        said = known.body or {"id": key, "verb": verb, "state": "accepted"}
        return Reply(reply_to, {**said, "repeated": True})

    def _know(self, command: Command, arguments: bytes, now: float) -> None:
        self._known[command.key] = _Known(command.verb, arguments, now, nbytes=len(arguments))
        self._nbytes += len(arguments)
        if command.changes:
            self._changed[command.key] = None
            while len(self._changed) > _KEEP_CHANGES:
                self._changed.popitem(last=False)

    def _answer(self, command: Command, said: dict[str, object], now: float) -> Reply:
        body: dict[str, object] = {"id": command.key, "verb": command.verb, **said}
        known = self._known.get(command.key)
        if known is not None:
            nbytes = len(msgspec.json.encode(body))
            known.body, known.at = body, now
            known.nbytes += nbytes
            self._nbytes += nbytes
        self._forget(now)
        return Reply(command.reply_to, body)

    def _forget(self, now: float) -> None:
        """What is too old, and the oldest answers of too many. What is being done stays: it is bounded by the rates."""
        for key, known in list(self._known.items()):
            over = len(self._known) > _KEEP_ANSWERS or self._nbytes > _KEEP_BYTES
            if not over and now - known.at < KEEP_S:
                return
            if known.body is not None:
                del self._known[key]
                self._nbytes -= known.nbytes

    def _refuse(self, reply_to: ReplyTo, key: str, verb: str, reason: Reason, message: str, hint: str = "") -> Reply:
        self._counts["refused"] += 1
        return Reply(reply_to, {"id": key, "verb": verb[:64], "state": "refused", **_why(reason, message, hint)})


def _why(reason: Reason, message: str, hint: str = "") -> dict[str, object]:
    said: dict[str, object] = {"reason": reason.value, "code": int(TABLE[reason].mqtt), "error": message[:500]}
    return {**said, "hint": hint[:500]} if hint else said
