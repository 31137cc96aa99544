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
from agent.access.tls import shown
from agent.config import Config
from agent.device.storage import Storage, read_storage
from agent.device.thermal import Thermal, read_thermal
from agent.errors import ConfigError
from agent.fleet import figures, sparkplug
from agent.fleet.counter import Counter, read_changed
from agent.fleet.figures import Figures
from agent.fleet.metrics import watch
from agent.fleet.results import judged
from agent.fleet.sparkplug import Sparkplug
from agent.fleet.watch import Watch, throttled
from agent.fleet.work import Settings, Work
from agent.gateway import Gateway
from agent.http.v2 import V2
from agent.journal import Activate, EngineDown, Failed, Happening, Load, Unload
from agent.limits.rates import Rates
from agent.mqtt import home_assistant
from agent.mqtt.alarms import Alarm
from agent.mqtt.link import Connected, Lost
from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Clock, Quality
from agent.mqtt.packet import Incoming, Outgoing
from agent.mqtt.publisher import AGENT, Publisher
from agent.mqtt.rules import ResultOptions, Rule
from agent.mqtt.settings import Mqtt
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.mqtt.spool.spool import SpoolError
from agent.page.status import Status
from agent.repository import Repository
from agent.results import Kept, Missed, Policy
from targets.errors import TightfitError, did_you_mean

# Of a log that cannot be opened, and of a task that failed.
_AGAIN_S = 60.0
_FAILED_S = 5.0
# Of births that others ask for at once: each is many messages for their one.
_BIRTHS = 5
# All of the journal, and of a model's results all that are kept: whoever reads late is told what he missed.
_BACKLOG = 1 << 16
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
        self._alarms = Watch(config.mqtt.limits, config.mqtt.stable_s, self._say_alarm)
        self._sparkplug = Sparkplug(config.mqtt, version) if config.mqtt.sparkplug else None
        self._births = Rates(1.0, _BIRTHS, 0)
        """Those that others ask for."""
        self._discovered: set[str] = set()
        """Topics at which Home Assistant was told of something."""
        self._status: Status | None = None
        self._publisher: Publisher | None = None
        self._counter: Counter | None = None
        answer_bytes = (config.mqtt.message_kib << 10) - _AROUND_BYTES
        self._work = Work(gateway, repository, api, self._live, self._pong, max(answer_bytes, 1024))
        self._tasks: set[asyncio.Task[Any]] = set()
        watch(gateway.telemetry, self)

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._counter is not None:
            await self._counter.close()
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
        settings = self._settings
        changed = await asyncio.to_thread(read_changed, settings.spool_folder)
        self._counter = Counter(settings, publisher, self._work, self._access.audit, changed)
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
        if self._publisher is not None:
            self._measure(figures.queue(status, self._publisher.spool, self._publisher.link, self.command_figures))
        if self._sparkplug is not None:
            self._sparkplug.forget("Models/")
            self._sparkplug.tell(sparkplug.of_agent(status))
        now = time.monotonic()
        self._alarms.judge("memory", figures.used_share(status.memory), now)
        self._alarms.judge("misses", figures.miss_share(status), now)
        self._alarms.link_holds(now)
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
        self._alarms.judge("temperature", thermal.hottest_c, began)
        if storage is not None:
            self._alarms.judge("storage_free", storage.free_bytes / (1 << 20), began)
            self._alarms.judge("storage_life", storage.used_life, began)
        # By a clock that nobody has set every certificate may seem to have expired.
        self._alarms.judge("certificate_days", None if now.quality is Quality.UNSYNCED else days.least, began)
        self._alarms.say("throttled", raised=thermal.throttled, text=throttled(thermal), now=began)
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
                    if taken.value.nbytes <= _QUICK_BYTES:
                        self._result(rule, judged(*work))
                    else:
                        await self._judged_elsewhere(*work)
                elif isinstance(taken, Missed):
                    rule.missed(taken.last + 1 - taken.first)
                elif taken is None:
                    await follower.wait(60.0)
        finally:
            # At a stop: of what was answered nothing is left out.
            while isinstance(taken := follower.take(), Kept):
                self._result(rule, judged(rule, taken.value, feed.results.epoch, taken.seq, time.monotonic()))
            follower.close()

    async def _judged_elsewhere(self, rule: Rule, *work: Any) -> None:
        """The same of a large result, in a thread, and also where it is the last one before a stop."""
        future = asyncio.get_running_loop().run_in_executor(None, judged, rule, *work)
        try:
            await asyncio.shield(future)
        finally:
            await asyncio.wait([future])
            self._result(rule, future.result())

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

    def _say_alarm(self, alarm: Alarm) -> None:
        self._log.warning("alarm", name=alarm.name, raised=alarm.raised, text=alarm.text)
        self.publish(AGENT, Kind.ALARM, alarm.name, "alarm/1", figures.alarm(alarm))

    # --- what the link hears

    def connected(self, what: Connected) -> None:
        """Of the link."""
        self._alarms.connected(time.monotonic())
        details = {"protocol": what.limits.protocol, "session_present": what.session_present}
        self._event("connected", str(what.broker), details)

    def lost(self, what: Lost) -> None:
        """Of the link."""
        if self._alarms.lost():
            self._event("disconnected", str(what.broker), {"trouble": what.trouble.value, "error": what.text[:200]})

    def alarm(self, name: str, text: str) -> None:
        """Of the link. It says so each time; here it is raised once."""
        self._alarms.of_link(name, text[:500], time.monotonic())

    def command(self, message: Incoming) -> None:
        """Of the link."""
        counter, publisher = self._counter, self._publisher
        if counter is None or publisher is None:
            return
        if message.topic == f"{self._settings.home_assistant}/status":
            if message.payload == home_assistant.ONLINE and not self._births.wait_s("", time.monotonic()):
                publisher.say_state()
            return
        counter.receive(message)

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
    def command_figures(self) -> Mapping[str, int]:
        return self._counter.figures if self._counter else {}


# Results that are hashed and put together on the loop: tens of microseconds.
_QUICK_BYTES = 64 << 10


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
