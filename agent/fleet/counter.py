"""Where commands come in, and answers go out: each is decided by the desk, done, and answered. On the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent import log
from agent.access.audit import Audit
from agent.access.callers import Role
from agent.errors import Reason
from agent.fleet.work import Work, reason_of
from agent.mqtt import topics
from agent.mqtt.boots import read_whole, write_whole
from agent.mqtt.commands import Address, Command, Desk, Ignored, Reply
from agent.mqtt.message import Kind, Message
from agent.mqtt.packet import Incoming
from agent.mqtt.publisher import Publisher
from agent.mqtt.settings import Mqtt
from targets.errors import TightfitError

_CHANGED = "commands.json"
# Who asked and went does not want an answer of yesterday.
_ANSWER_EXPIRY_S = 3600


class Counter:
    """`changed` are ids of commands of before this start."""

    def __init__(self, settings: Mqtt, publisher: Publisher, work: Work, audit: Audit, changed: Iterable[str]) -> None:
        self._settings, self._publisher, self._work, self._audit = settings, publisher, work, audit
        self._desk = Desk(
            [Role(each) for each in settings.commands], self._may_answer_at, settings.command_expiry_s,
            settings.commands_per_s, settings.commands_burst, settings.command_kib << 10, changed,
        )  # fmt: skip
        self._log = log.get("mqtt")
        self._doing: set[asyncio.Task[Any]] = set()

    @property
    def figures(self) -> Mapping[str, int]:
        """What became of commands."""
        return self._desk.figures._asdict()

    async def close(self) -> None:
        """Do no more."""
        for task in self._doing:
            task.cancel()
        await asyncio.gather(*self._doing, return_exceptions=True)

    def receive(self, message: Incoming) -> None:
        """One has come. What is none is a line in the log."""
        try:
            topic = topics.parse(self._settings.prefix, message.topic)
        except ValueError as error:
            self._log.warning("a command is ignored", topic=message.topic[:200], why=str(error)[:200])
            return
        decided = self._desk.receive(message, Address(topic.component, topic.name), time.monotonic())
        if isinstance(decided, Ignored):
            self._log.warning("a command is ignored", topic=message.topic[:200], why=decided.why)
        elif isinstance(decided, Reply):
            self._reply(decided)
        else:
            task = asyncio.get_running_loop().create_task(self._do(decided))
            self._doing.add(task)
            task.add_done_callback(self._doing.discard)

    def _may_answer_at(self, text: str) -> bool:
        """Whether a response topic is one of this device's own: it may not have us write wherever it likes."""
        try:
            topic = topics.parse(self._settings.prefix, text)
        except ValueError:
            return False
        return topic.kind is Kind.RESULT and topic.device == self._settings.device_name

    async def _do(self, command: Command) -> None:
        desk = self._desk
        self._reply(desk.accepted(command))
        if command.changes:
            # Before it is done: what was begun is not begun again after a crash.
            await self._remember()
        try:
            result = await self._work.do(command)
            reply, outcome = desk.done(command, result, time.monotonic()), "done"
        except TightfitError as error:
            reason = reason_of(error)
            reply = desk.failed(command, reason, error.message, time.monotonic(), error.hint)
            outcome = reason.value
        except Exception:  # noqa: BLE001 - answered, and logged; the agent goes on
            self._log.exception("a command failed", verb=command.verb)
            reply = desk.failed(command, Reason.FAULT, "a fault of the agent's own: see its log", time.monotonic())
            outcome = Reason.FAULT.value
        if command.changes:
            self._audit.done(command.verb, "MQTT", command.reply_to.role, outcome, id=command.key)
        self._reply(reply)

    async def _remember(self) -> None:
        path, data = self._settings.spool_folder / _CHANGED, msgspec.json.encode(self._desk.changed)
        try:
            await asyncio.to_thread(write_whole, path, data)
        except OSError as error:
            self._log.error("a command's id is not noted: after a restart it could be done again", error=str(error))

    def _reply(self, reply: Reply) -> None:
        to = reply.reply_to
        self._publisher.publish(
            Message(
                to.role, Kind.RESULT, to.verb[:64], reply.body, self._publisher.now(), "response/1",
                expiry_s=_ANSWER_EXPIRY_S, traceparent=to.traceparent or None, response_topic=to.topic or None,
                correlation=to.correlation or None,
            )
        )  # fmt: skip


def read_changed(folder: Path) -> list[str]:
    """Ids of commands that were begun before; none where nothing can be read."""
    try:
        return msgspec.json.decode(read_whole(folder / _CHANGED) or b"[]", type=list[str])
    except msgspec.DecodeError:
        return []
