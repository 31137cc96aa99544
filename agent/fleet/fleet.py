"""The agent among a fleet: publishes what happens and how it does, and takes commands, over MQTT.

Theory of operation. One publisher has the log and the connection. Tasks feed it: one for the agent's figures and one
for the board's, in their periods; one for events; one for each model whose results are wanted. What they read is kept
or counted anyway, so that nothing waits for MQTT, and without a broker all is as it was. When a task fails it is
logged, and begins again; when the log cannot be opened, that is tried again, and meanwhile nothing is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agent import log
from agent.access.access import Access
from agent.access.callers import Role
from agent.access.tls import shown
from agent.config import Config
from agent.device.storage import Storage, read_storage
from agent.device.thermal import Thermal, read_thermal
from agent.errors import ConfigError, Reason
from agent.fleet import figures, sparkplug
from agent.fleet.figures import Figures
from agent.fleet.results import judged
from agent.fleet.sparkplug import Sparkplug
from agent.fleet.work import Settings, Work, reason_of
from agent.gateway import Gateway
from agent.http.v2 import V2
from agent.journal import Activate, EngineDown, Failed, Happening, Load, Unload
from agent.mqtt import home_assistant, topics
from agent.mqtt.alarms import Alarm, Alarms, Limit
from agent.mqtt.boots import read_whole, write_whole
from agent.mqtt.commands import Address, Command, Desk, Ignored, Reply
from agent.mqtt.link import Connected, Lost
from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Clock, Quality
from agent.mqtt.packet import Incoming, Outgoing
from agent.mqtt.publisher import AGENT, Publisher
from agent.mqtt.rules import ResultOptions, Rule
from agent.mqtt.settings import LimitOptions, Mqtt
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.mqtt.spool.spool import SpoolError
from agent.page.status import Status
from agent.repository import Repository
from agent.results import Kept, Missed, Policy
from targets.errors import TightfitError, did_you_mean

# Of a log that cannot be opened, and of a task that failed.
_AGAIN_S = 60.0
_FAILED_S = 5.0
# All of the journal, and of a model's results all that are kept: whoever reads late is told what he missed.
_BACKLOG = 1 << 16
_CHANGED = "commands.json"
_BIRTH = (Load, Activate, Unload, Failed, EngineDown)
"""Happenings after which the state of the device is another."""
# What an answer has around it, generously.
_AROUND_BYTES = 4096


class Fleet:
    """Made when everything else is there; `begin` and `close` are in the loop."""

    def __init__(
        self, config: Config, gateway: Gateway, repository: Repository, api: V2, access: Access, version: str,
        root: Path = Path("/"),
    ) -> None:  # fmt: skip
        """Raises ConfigError where [mqtt] names what is not there."""
        self._settings, self._gateway, self._repository, self._api = config.mqtt, gateway, repository, api
        self._access, self._version, self._root = access, version, root
        self._config_sha256 = hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()
        _check_results(config.mqtt, repository)
        self._rules = [Rule(each) for each in config.mqtt.results]
        self._clock = Clock(Quality(config.mqtt.clock) if config.mqtt.clock else None)
        self._log = log.get("mqtt")
        self._began = time.monotonic()
        self._live = Settings(config.mqtt.telemetry_s, config.mqtt.device_s)
        self._alarms = Alarms(_limits(config.mqtt.limits))
        self._of_link: set[str] = set()
        """Alarms that the link has raised."""
        self._connected_at: float | None = None
        self._sparkplug = Sparkplug(config.mqtt, version) if config.mqtt.sparkplug else None
        self._discovered: set[str] = set()
        """Topics at which Home Assistant was told of something."""
        self._status: Status | None = None
        self._publisher: Publisher | None = None
        self._desk: Desk | None = None
        answer_bytes = (config.mqtt.message_kib << 10) - _AROUND_BYTES
        self._work = Work(gateway, repository, api, self._live, self._pong, max(answer_bytes, 1024))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._doing: set[asyncio.Task[Any]] = set()
        """Commands that are being done."""
        _watch(gateway, self)

    # --- life

    async def begin(self) -> None:
        """Publish from now on. Raises ConfigError where a file that [mqtt] names cannot be used."""
        try:
            await self._open()
        except SpoolError as error:
            self._log.error("nothing is published: the log cannot be opened", error=str(error), retry_s=_AGAIN_S)
            self._spawn(self._open_later())

    async def close(self) -> None:
        """Say goodbye, and make durable what could not be sent."""
        for task in (*self._tasks, *self._doing):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._doing, return_exceptions=True)
        if self._publisher is not None:
            try:
                if self._sparkplug is not None:
                    await self._sparkplug.stop()
                await self._publisher.stop()
            except Exception:  # noqa: BLE001 - the agent ends all the same, and what was durable still is
                self._log.exception("telemetry did not end well")

    async def _open_later(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                return await self._open()
            except TightfitError as error:
                self._log.error("nothing is published", error=str(error), retry_s=_AGAIN_S)

    async def _open(self) -> None:
        self._status = await self._api.page.current()
        publisher = await Publisher.open(self._settings, self._clock, self._state)
        changed = await asyncio.to_thread(_read_changed, self._settings.spool_folder / _CHANGED)
        settings = self._settings
        self._desk = Desk(
            [Role(each) for each in settings.commands], self._may_answer_at, settings.command_expiry_s,
            settings.commands_per_s, settings.commands_burst, settings.command_kib << 10, changed,
        )  # fmt: skip
        self._publisher = publisher
        try:
            status = (f"{settings.home_assistant}/status",) if settings.home_assistant else ()
            publisher.start(self, self._meta, self._discovery, status)
        except ConfigError:
            await publisher.stop()
            self._publisher = None
            raise
        if self._sparkplug is not None:
            self._sparkplug.tell(sparkplug.of_agent(self._status))
            self._sparkplug.start()
        self._spawn(self._again("telemetry", self._tell_agent))
        self._spawn(self._again("the board", self._tell_board))
        self._spawn(self._again("events", self._tell_events))
        for rule in self._rules:
            self._spawn(self._again(f"results of {rule.options.model}", partial(self._tell_results, rule)))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it for ever, whatever happens to it."""
        while True:
            try:
                await work()
            except TightfitError as error:
                # Such as of a model that was configured away.
                self._log.warning("this is not published for now", what=what, error=str(error), retry_s=_AGAIN_S)
                await asyncio.sleep(_AGAIN_S)
            except Exception:  # noqa: BLE001 - the agent serves on, and so does all other telemetry
                self._log.exception("telemetry failed, and is begun anew", what=what)
                await asyncio.sleep(_FAILED_S)

    # --- what is said

    def publish(
        self, component: str, kind: Kind, name: str, schema: str, body: Mapping[str, object],
        expiry_s: int | None = None,
    ) -> bool:  # fmt: skip
        """One message; False where the log refused it."""
        if self._publisher is None:
            return False
        now = self._publisher.now()
        return self._publisher.publish(Message(component, kind, name, body, now, schema, expiry_s=expiry_s))

    def _measure(self, found: Figures) -> None:
        expiry_s = self._settings.telemetry_expiry_s or None
        self.publish(found.component, Kind.MEASURE, found.name, f"{found.name}/1", found.body, expiry_s)

    async def _tell_agent(self) -> None:
        """Figures of the agent, once in a period."""
        began = time.monotonic()
        status = self._status = await self._api.page.current()
        for found in figures.of_agent(status):
            self._measure(found)
        if self._publisher is not None and self._desk is not None:
            commands = self._desk.figures._asdict()
            self._measure(figures.queue(status, self._publisher.spool, self._publisher.link, commands))
        if self._sparkplug is not None:
            self._sparkplug.forget("Models/")
            self._sparkplug.tell(sparkplug.of_agent(status))
        now = time.monotonic()
        self._judge("memory", figures.used_share(status.memory), now)
        self._judge("misses", figures.miss_share(status), now)
        self._clear_link(now)
        await self._pause(began, lambda: self._live.telemetry_s)

    async def _tell_board(self) -> None:
        """Figures of the board, once in a period."""
        began = time.monotonic()
        thermal, storage, expires_s = await asyncio.to_thread(self._read_board)
        now = self._clock.now()
        days = figures.Days(figures.days_left(self._access.expires, now), figures.days_left(expires_s, now))
        self._measure(figures.board(thermal, storage, now, days))
        if self._sparkplug is not None:
            self._sparkplug.tell(sparkplug.of_board(thermal, storage))
        self._judge("temperature", thermal.hottest_c, began)
        if storage is not None:
            self._judge("storage_free", storage.free_bytes / (1 << 20), began)
            self._judge("storage_life", storage.used_life, began)
        # By a clock that nobody has set every certificate may seem to have expired.
        self._judge("certificate_days", None if now.quality is Quality.UNSYNCED else days.least, began)
        self._say_alarm(self._alarms.say("throttled", raised=thermal.throttled, text=_throttled(thermal), now=began))
        await self._pause(began, lambda: self._live.device_s)

    async def _pause(self, began: float, period_s: Callable[[], float]) -> None:
        """Until the period is over, which may become another meanwhile."""
        while (left_s := began + period_s() - time.monotonic()) > 0:
            self._live.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._live.changed.wait(), left_s)

    def _read_board(self) -> tuple[Thermal, Storage | None, float]:
        """(how hot it is, how worn, when the certificate expires that is shown to brokers)."""
        storage, expires_s = None, 0.0
        with contextlib.suppress(OSError):
            storage = read_storage(self._settings.spool_folder, self._root)
        if self._settings.certificate:
            # One that cannot be read is no figure, and the link says so.
            with contextlib.suppress(ConfigError):
                expires_s = shown(self._settings.certificate, self._settings.key).expires
        return read_thermal(self._root), storage, expires_s

    async def _tell_events(self) -> None:
        """What happens to models and engines, from the first on."""
        follower = self._gateway.journal.feed.follow(Policy.LATEST, None, _BACKLOG)
        try:
            while True:
                taken = follower.take()
                if isinstance(taken, Kept):
                    await self._tell_event(taken.seq, taken.value)
                elif isinstance(taken, Missed):
                    details = {"first": taken.first, "last": taken.last}
                    self._event("missed", "events happened faster than they were read", details)
                elif taken is None:
                    await follower.wait(60.0)
        finally:
            follower.close()

    async def _tell_event(self, number: int, happening: Happening) -> None:
        name, body = figures.event(number, happening)
        self.publish(AGENT, Kind.EVENT, name, "event/1", body)
        if isinstance(happening, _BIRTH) and self._publisher is not None:
            self._status = await self._api.page.current()
            self._publisher.say_state()

    async def _tell_results(self, rule: Rule) -> None:
        """Results of one model, from now on."""
        feed = self._api.feeds.of(self._repository.find(rule.options.model))
        follower = feed.follow(Policy.LATEST, None, _BACKLOG)
        try:
            while True:
                taken = follower.take()
                if isinstance(taken, Kept):
                    work = (rule, taken.value, feed.results.epoch, taken.seq, time.monotonic())
                    quick = taken.value.nbytes <= _QUICK_BYTES
                    self._result(rule, judged(*work) if quick else await asyncio.to_thread(judged, *work))
                elif isinstance(taken, Missed):
                    rule.missed(taken.last + 1 - taken.first)
                elif taken is None:
                    await follower.wait(60.0)
        finally:
            # At a stop: of what was answered nothing is left out.
            while isinstance(taken := follower.take(), Kept):
                self._result(rule, judged(rule, taken.value, feed.results.epoch, taken.seq, time.monotonic()))
            follower.close()

    def _result(self, rule: Rule, body: Mapping[str, object] | None) -> None:
        if body is not None:
            component = figures.component_of(rule.options.model)
            self.publish(component, Kind.MEASURE, "result", "result/1", body)

    def _event(self, name: str, text: str, details: Mapping[str, object]) -> None:
        self.publish(AGENT, Kind.EVENT, name, "event/1", {"event": name, "text": text, "details": details})

    def _state(self) -> dict[str, object]:
        """What a birth says beside the status."""
        status, now = self._status, self._clock.now()
        body: dict[str, object] = {
            "versions": {
                "tightfit": self._version, "python": platform.python_version(), "kernel": platform.release(),
                "machine": platform.machine(),
            },
            "boot": now.boot_id,
            "clock_quality": now.quality.value,
            "config_sha256": self._config_sha256,
            "commands": list(self._settings.commands),
        }  # fmt: skip
        if status is not None:
            body["models"] = figures.models(status.models)
            body["board"] = next((each.board for each in status.models if each.board), "")
            body["plan"] = figures.plan_of(status.memory)
            body["limit_bytes"] = status.memory.budget_bytes
        return body

    def _meta(self) -> list[Message]:
        """What the figures are."""
        now, live = self._clock.now(), self._live
        return [
            Message(
                component, Kind.META, name,
                figures.meta((component, name), live.device_s if component == figures.DEVICE else live.telemetry_s),
                now, "meta/1", retain=True,
            )
            for component, name in figures.META
        ]  # fmt: skip

    def _discovery(self) -> list[Outgoing]:
        """What Home Assistant wants to know, and what it may forget."""
        settings, status = self._settings, self._status
        discovery, device = settings.home_assistant, settings.device_name
        if not discovery or status is None:
            return []
        names = dict.fromkeys(each.name for each in status.models)
        entities = [*home_assistant.ENTITIES, *(each for name in names for each in home_assistant.of_model(name))]
        told = {home_assistant.topic_of(discovery, device, each) for each in entities}
        gone, self._discovered = sorted(self._discovered - told), told
        board = next((each.board for each in status.models if each.board), "")
        periods_s = {"agent": self._live.telemetry_s, "device": self._live.device_s}
        return home_assistant.removals(gone) + home_assistant.documents(
            entities, discovery, settings.prefix, device, self._version, board, periods_s
        )

    # --- alarms

    def _judge(self, name: str, value: float | None, now: float) -> None:
        if self._alarms.knows(name):
            self._say_alarm(self._alarms.judge(name, value, now))

    def _say_alarm(self, alarm: Alarm | None) -> None:
        if alarm is None:
            return
        body: dict[str, object] = {
            "name": alarm.name, "raised": alarm.raised, "text": alarm.text, "stood_s": round(alarm.stood_s, 3),
        }  # fmt: skip
        for name, value in (("value", alarm.value), ("limit", alarm.limit), ("unit", alarm.unit or None)):
            if value is not None:
                body[name] = value
        self._log.warning("alarm", name=alarm.name, raised=alarm.raised, text=alarm.text)
        self.publish(AGENT, Kind.ALARM, alarm.name, "alarm/1", body)

    def _clear_link(self, now: float) -> None:
        """What the link raised is over when a connection has held for long enough."""
        at = self._connected_at
        if self._of_link and at is not None and now - at >= self._settings.stable_s:
            for name in sorted(self._of_link):
                text = f"a connection has held for {self._settings.stable_s:g} s"
                self._say_alarm(self._alarms.say(name, raised=False, text=text, now=now))
            self._of_link.clear()

    # --- what the link hears

    def connected(self, what: Connected) -> None:
        """Of the link."""
        self._connected_at = time.monotonic()
        details = {"protocol": what.limits.protocol, "session_present": what.session_present}
        self._event("connected", str(what.broker), details)

    def lost(self, what: Lost) -> None:
        """Of the link."""
        if self._connected_at is not None:
            self._event("disconnected", str(what.broker), {"trouble": what.trouble.value, "error": what.text[:200]})
        self._connected_at = None

    def alarm(self, name: str, text: str) -> None:
        """Of the link. It says so each time; here it is raised once."""
        self._of_link.add(name)
        self._say_alarm(self._alarms.say(name, raised=True, text=text[:500], now=time.monotonic()))

    def command(self, message: Incoming) -> None:
        """Of the link."""
        desk = self._desk
        if desk is None:
            return
        if self._publisher is not None and message.topic == f"{self._settings.home_assistant}/status":
            if message.payload == home_assistant.ONLINE:
                self._publisher.say_state()
            return
        try:
            topic = topics.parse(self._settings.prefix, message.topic)
        except ValueError as error:
            self._log.warning("a command is ignored", topic=message.topic[:200], why=str(error)[:200])
            return
        decided = desk.receive(message, Address(topic.component, topic.name), time.monotonic())
        if isinstance(decided, Ignored):
            self._log.warning("a command is ignored", topic=message.topic[:200], why=decided.why)
        elif isinstance(decided, Reply):
            self._reply(decided)
        else:
            task = asyncio.get_running_loop().create_task(self._do(desk, decided))
            self._doing.add(task)
            task.add_done_callback(self._doing.discard)

    # --- commands

    def _may_answer_at(self, text: str) -> bool:
        """Whether a response topic is one of this device's own: it may not have us write wherever it likes."""
        try:
            topic = topics.parse(self._settings.prefix, text)
        except ValueError:
            return False
        return topic.kind is Kind.RESULT and topic.device == self._settings.device_name

    async def _do(self, desk: Desk, command: Command) -> None:
        self._reply(desk.accepted(command))
        if command.changes:
            # Before it is done: what was begun is not begun again after a crash.
            await self._remember(desk)
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
            self._access.audit.done(command.verb, "MQTT", command.reply_to.role, outcome, id=command.key)
        self._reply(reply)

    async def _remember(self, desk: Desk) -> None:
        path, data = self._settings.spool_folder / _CHANGED, msgspec.json.encode(desk.changed)
        try:
            await asyncio.to_thread(write_whole, path, data)
        except OSError as error:
            self._log.error("a command's id is not noted: after a restart it could be done again", error=str(error))

    def _reply(self, reply: Reply) -> None:
        if self._publisher is None:
            return
        to = reply.reply_to
        self._publisher.publish(
            Message(
                to.role, Kind.RESULT, to.verb[:64], reply.body, self._publisher.now(), "response/1",
                expiry_s=_ANSWER_EXPIRY_S, traceparent=to.traceparent or None, response_topic=to.topic or None,
                correlation=to.correlation or None,
            )
        )  # fmt: skip

    def _pong(self) -> object:
        publisher = self._publisher
        return {
            "version": self._version,
            "session": publisher.session if publisher else "",
            "uptime_s": round(time.monotonic() - self._began, 3),
            "ready": self._repository.ready,
        }

    # --- metrics

    @property
    def spool_figures(self) -> SpoolFigures | None:
        return self._publisher.spool if self._publisher else None

    @property
    def link_figures(self) -> LinkFigures:
        return self._publisher.link if self._publisher else LinkFigures()

    @property
    def command_figures(self) -> dict[str, int]:
        return self._desk.figures._asdict() if self._desk else {}


# Results that are hashed and put together on the loop: tens of microseconds.
_QUICK_BYTES = 64 << 10
# Who asked and went does not want an answer of yesterday.
_ANSWER_EXPIRY_S = 3600


def _check_results(settings: Mqtt, repository: Repository) -> None:
    """Raise ConfigError where results are to be published that are not kept."""
    for options in settings.results:
        entry = next((each for each in repository.entries if each.name == options.model), None)
        if entry is None:
            names = [each.name for each in repository.entries]
            raise ConfigError(
                f"results of {options.model!r} are to be published, and there is no such model",
                did_you_mean(options.model, names),
            )
        if not entry.options.results_bytes:
            raise ConfigError(
                f"results of {options.model!r} are to be published, and none are kept",
                "set results_mib for it under [[models]]: they are taken from there",
            )
        _check_outputs(
            options, [spec.name for spec in entry.active.model.contract.whole.outputs] if entry.active else []
        )


def _check_outputs(options: ResultOptions, known: list[str]) -> None:
    for name in (options.output, *options.outputs):
        if name and known and name not in known:
            raise ConfigError(f"model {options.model!r} has no output {name!r}", did_you_mean(name, known))


def _limits(options: LimitOptions) -> list[Limit]:
    """Those that are to be raised at all."""
    limits = (
        Limit("temperature", options.temperature_c, 5.0, unit=" C"),
        Limit("storage_free", options.storage_free_mib, options.storage_free_mib / 4, above=False, unit=" MiB"),
        Limit("storage_life", options.storage_life, 5.0, unit=" %"),
        Limit("certificate_days", options.certificate_days, 1.0, above=False, unit=" days"),
        Limit("memory", options.memory, 5.0, unit=" %"),
        Limit("misses", options.misses, options.misses / 2, unit=" %"),
    )
    return [limit for limit in limits if limit.at > 0]


def _throttled(thermal: Thermal) -> str:
    by = ", ".join(figures.throttling(thermal))
    return f"the board is slowed down: {by}"[:500] if by else "the board runs at its full speed"


def _read_changed(path: Path) -> list[str]:
    try:
        return msgspec.json.decode(read_whole(path) or b"[]", type=list[str])
    except msgspec.DecodeError:
        return []


def _watch(gateway: Gateway, fleet: Fleet) -> None:
    """Metrics: of each class produced = delivered + dropped + queued, and how the link does."""
    telemetry = gateway.telemetry

    def of_classes(read: Callable[[SpoolFigures], _Series]) -> Callable[[], _Series]:
        return lambda: read(found) if (found := fleet.spool_figures) else []

    def counted(name: str) -> Callable[[SpoolFigures], _Series]:
        return lambda found: [((kind,), getattr(each, name)) for kind, each in found.by_kind.items()]

    def worn(name: str) -> Callable[[], float]:
        return lambda: getattr(found.wear, name) if (found := fleet.spool_figures) else 0.0

    def series(name: str, text: str, labels: tuple[str, ...], read: Callable[[], _Series], *, count: bool) -> None:
        telemetry.watch_series(f"tightfit_mqtt_{name}", text, labels, read, count=count)

    by_class = ("class",)
    series("produced", "Messages that were made.", by_class, of_classes(counted("produced")), count=True)
    series("delivered", "Messages that a broker acknowledged.", by_class, of_classes(counted("delivered")), count=True)
    series("dropped", "Messages that are lost, by why.", ("class", "reason"), of_classes(_dropped), count=True)
    series("queued", "Messages that wait.", by_class, of_classes(counted("queued")), count=False)
    series("spool_pending", "Messages that are not durable yet.", (), of_classes(_pending), count=False)
    series("spool_bytes", "Storage that waiting messages have.", by_class, of_classes(_stored), count=False)
    series("commands", "Commands by what became of them.", ("outcome",), lambda: _commands(fleet), count=True)
    for name, text, attribute in (
        ("appended_bytes", "Bytes of messages that went into the log.", "bytes_appended"),
        ("written_bytes", "Bytes that the log has written to the storage.", "bytes_written"),
        ("syncs", "How often the log had the storage make them durable.", "syncs"),
    ):
        telemetry.watch_one_count(f"tightfit_mqtt_spool_{name}", text, worn(attribute))
    link = {
        "connected": ("1 while there is a broker.", lambda: fleet.link_figures.is_connected),
        "inside": ("Messages that are not acknowledged yet.", lambda: fleet.link_figures.inside),
    }
    for name, (text, read) in link.items():
        telemetry.watch_one(f"tightfit_mqtt_{name}", text, read)
    telemetry.watch_one_count(
        "tightfit_mqtt_connections", "Connections that were made.", lambda: fleet.link_figures.connections
    )


_Series = list[tuple[tuple[str, ...], float]]


def _dropped(found: SpoolFigures) -> _Series:
    return [((kind, why), count) for kind, each in found.by_kind.items() for why, count in each.dropped.items()]


def _pending(found: SpoolFigures) -> _Series:
    return [((), found.pending)]


def _stored(found: SpoolFigures) -> _Series:
    return [((kind,), nbytes) for kind, nbytes in found.bytes_by_kind.items()]


def _commands(fleet: Fleet) -> _Series:
    return [((outcome,), count) for outcome, count in fleet.command_figures.items()]
