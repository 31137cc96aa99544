"""The agent as an edge node of Sparkplug B: on a connection of its own, as its will has to be another one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from agent import log
from agent.device.storage import Storage
from agent.device.thermal import Thermal
from agent.limits.rates import Rates
from agent.mqtt.link import Connected, Link, Lost
from agent.mqtt.packet import Incoming, Outgoing
from agent.mqtt.settings import Mqtt
from agent.mqtt.sparkplug import Metric, Node, is_rebirth
from agent.page.status import Status


class _Nothing(NamedTuple):
    position: int


class _NoMessages:
    """Data goes ahead of all that would wait: a birth on the next connection says all that was missed."""

    def connected(self) -> None:
        """Of a source."""

    def live(self, most: int, after: int = -1) -> Sequence[_Nothing]:  # noqa: ARG002
        return ()

    def replay(self, most: int, after: int = -1) -> Sequence[_Nothing]:  # noqa: ARG002
        return ()

    def delivered(self, position: int) -> None:
        """Of a source."""

    def rejected(self, position: int, reason: str) -> None:
        """Of a source."""


class Sparkplug:
    """`metrics` are those of now."""

    def __init__(self, settings: Mqtt, version: str) -> None:
        self._node = Node(settings.sparkplug, settings.device_name)
        # Those that hosts ask for: each is many metrics for a few bytes.
        self._births = Rates(1.0, 5, 0)
        self._metrics: dict[str, Metric] = {"Agent/Version": Metric(version, str)}
        self._log = log.get("sparkplug")
        # A node has a session for as long as a connection (tck-id-principles-persistence-clean-session-50).
        own = replace(settings, client_id=f"{settings.client_name}-sparkplug", session_expiry_s=0, will_delay_s=0)
        self._link: Link[_Nothing] = Link(
            own, _NoMessages(), _never, self, will=self._node.connects, greeting=lambda _: [self._birth()],
            filters=[self._node.commands],
        )  # fmt: skip

    def start(self) -> None:
        """Connect."""
        self._link.start()

    async def stop(self) -> None:
        """Say that it is on purpose (tck-id-operational-behavior-edge-node-intentional-disconnect-ndeath)."""
        await self._link.stop(self._node.death())

    def tell(self, metrics: Mapping[str, Metric]) -> None:
        """These are the values now."""
        # One that goes is told of as null until the next birth, which is at once where another comes.
        self._metrics.update(metrics)
        if not self._link.state.is_connected:
            return
        if self._node.wants_birth(self._metrics):
            self._link.say([self._birth()])
        elif (data := self._node.data(self._metrics, _now_ms())) is not None:
            self._link.say([data])

    def forget(self, prefix: str) -> None:
        """What begins so is not told of any more."""
        self._metrics = {name: each for name, each in self._metrics.items() if not name.startswith(prefix)}

    def _birth(self) -> Outgoing:
        return self._node.birth(self._metrics, _now_ms())

    def connected(self, what: Connected) -> None:
        """Of the link."""

    def lost(self, what: Lost) -> None:
        """Of the link."""

    def alarm(self, name: str, text: str) -> None:
        """Of the link, which has logged it."""

    def command(self, message: Incoming) -> None:
        """Of the link: a host asks for another birth. No other command is taken here."""
        if is_rebirth(message.payload) and not message.retain:
            if self._births.wait_s("", time.monotonic()):
                return
            self._link.say([self._birth()])
        else:
            self._log.warning("a command is ignored", topic=message.topic[:200], why="it does not ask for a birth")


def of_agent(status: Status) -> dict[str, Metric]:
    """What hosts see of the agent and its models."""
    used = {"anonymous": 0, "file": 0}
    for each in status.memory.used:
        used[each.kind] = used.get(each.kind, 0) + each.nbytes
    metrics = {
        "Agent/State": Metric(status.state, str),
        "Agent/Answered": Metric(status.answered, int),
        "Agent/Memory/Anonymous": Metric(used["anonymous"], int),
        "Agent/Memory/Limit": Metric(status.memory.budget_bytes, int),
        "Agent/Deadline Misses": Metric(status.misses, int),
    }
    for model in status.models:
        metrics |= {
            f"Models/{model.name}/Version": Metric(model.version, str),
            f"Models/{model.name}/State": Metric(model.state, str),
            f"Models/{model.name}/Waiting": Metric(model.requests.door + model.requests.ready, int),
            f"Models/{model.name}/Engine Restarts": Metric(model.engine.restarts if model.engine else 0, int),
            f"Models/{model.name}/Latency p99": Metric(model.latency.p99_s, float),
        }
    return metrics


def of_board(thermal: Thermal, storage: Storage | None) -> dict[str, Metric]:
    """What hosts see of the board."""
    return {
        "Board/Temperature": Metric(thermal.hottest_c, float),
        "Board/Throttled": Metric(thermal.throttled, bool),
        "Board/Storage Free": Metric(storage.free_bytes if storage else None, int),
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _never(_: _Nothing, __: bool, ___: int) -> Outgoing:
    raise ValueError("there are no messages")
