"""What the configuration says of MQTT: the section [mqtt] (docs/mqtt.md). Pure."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.mqtt.brokers import Broker, parse_broker
from agent.mqtt.rules import ResultOptions
from agent.mqtt.spool.policy import LEAST_BYTES, Drop, Policy

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Expiry = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
# What may stand in a topic as one level, and in a client's name with every broker.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,63}){0,3}", re.ASCII)


# What is kept of each class while the broker is away: MiB, hours (0: for ever), and what goes first. The classes of
# topics; alarms and events are few, and worth more than measurements.
_KEPT = {
    "m": (64, 168.0, Drop.DECIMATE),
    "e": (16, 0.0, Drop.NEWEST),
    "a": (8, 0.0, Drop.NEWEST),
    "res": (4, 1.0, Drop.OLDEST),
}
# Where systemd, or a person, wants what a service keeps.
_STATE_FOLDER = Path("/var/lib/tightfit")
# Messages of telemetry become worthless: a broker that keeps them for somebody else may drop them then.
Period = Annotated[float, Meta(ge=1, le=86_400)]


class KeepOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of one class waits on the disk: at most `mib`, none older than `hours` (0: any age). `drop` says what goes
    where that is too much: the "oldest", the "newest", or, by and by, every second ("decimate")."""

    mib: Annotated[float, Meta(gt=0, le=1 << 20)] | None = None
    hours: Annotated[float, Meta(ge=0, le=87_600)] | None = None
    drop: Drop | None = None

    def __post_init__(self) -> None:
        if self.mib is not None and self.mib * (1 << 20) < LEAST_BYTES:
            raise ValueError(f"mib is {self.mib}: less than {LEAST_BYTES / (1 << 20):g} cannot be kept")


class LimitOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where alarms are raised; 0: never. Each is cleared a little on the other side of that.

    `temperature_c` of the hottest sensor; `storage_free_mib` where the spool is; `storage_life` in per cent of what the
    storage says it lives; `certificate_days` left to the one that HTTP is served with; `memory` in per cent of what
    this machine has for the agent; `misses` of deadlines in per cent of the requests of the last minutes.
    """

    temperature_c: Annotated[float, Meta(ge=0, le=200)] = 85.0
    storage_free_mib: Annotated[float, Meta(ge=0)] = 256.0
    storage_life: Annotated[float, Meta(ge=0, le=100)] = 80.0
    certificate_days: Annotated[float, Meta(ge=0)] = 14.0
    memory: Annotated[float, Meta(ge=0, le=100)] = 95.0
    misses: Annotated[float, Meta(ge=0, le=100)] = 10.0


class Mqtt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Telemetry to a broker, off where `brokers` names none: "mqtts://HOST:PORT", tried in order. Without TLS
    ("mqtt://") only one on this machine is, unless `allow_insecure_network` is said.

    Topics begin with `prefix`/v1/`device`; without one the device has this machine's name. Two clients with one
    `client_id` (DEVICE-agent) throw each other out. `protocol` "auto" is 5, or 3.1.1 where the broker has no other.

    `username` and `password` (a file with it, or `credential:NAME`), or a `certificate` with its `key`, say who we
    are; `ca` is the authority of the broker's certificate, else those of this machine are. They are looked at every
    `watch_s`; new ones are used at once, on a new connection.

    A broker that hears nothing for 1.5 x `keepalive_s` gives us up, and says our last will after `will_delay_s`; for
    `session_expiry_s` it keeps commands for us. A connection must be there within `connect_s`.

    At most `window` messages and `window_kib` are on their way at once, none larger than `message_kib`; of the past at
    most `replay_per_s` are sent in a second (0: any number). Where the broker acknowledges nothing for `stuck_s` the
    connection is made anew. After a failure the wait is random up to `first_wait_s`, doubled each time up to
    `most_wait_s`, and begins anew after a connection held for `stable_s`; what only a person can mend is tried again
    after `slow_first_wait_s` to `slow_most_wait_s`. A command may have `command_kib`.

    Payloads are `encoding`; measurements and results have `qos`, all else has 1. `clock` says what sets this machine's
    clock when the kernel says that something does. Telemetry of the agent is published every `telemetry_s`, of the
    board every `device_s`, each for `telemetry_expiry_s`; `results` are those of models. Where `home_assistant` is the
    prefix of its discovery ("homeassistant") it is told of them, and where `sparkplug` is a group the device is a node
    of that, too. What no broker acknowledged waits in the folder `spool` (empty: mqtt in $STATE_DIRECTORY, else in
    /var/lib/tightfit), of each class as much as `keep` says, while the file system has `free_floor_mib` left. `limits`
    are those of alarms.

    `commands` are the roles whose commands are taken: "observe", "infer", "admin". One without an expiry of its own is
    worth nothing after `command_expiry_s`; of each verb at most `commands_per_s` are taken, after `commands_burst`.
    """

    brokers: tuple[str, ...] = ()
    allow_insecure_network: bool = False
    prefix: str = "edge"
    device: str = ""
    client_id: str = ""
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    username: str = ""
    password: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    minimum: Literal["1.2", "1.3"] = "1.2"
    watch_s: _Seconds = 10.0
    keepalive_s: Annotated[int, Meta(ge=5, le=65_535)] = 30
    connect_s: Annotated[float, Meta(ge=1, le=120)] = 10.0
    session_expiry_s: _Expiry = 3600
    will_delay_s: Annotated[int, Meta(ge=0, le=3600)] = 15
    window: Annotated[int, Meta(ge=1, le=4096)] = 128
    window_kib: Annotated[int, Meta(ge=16, le=1 << 16)] = 1024
    message_kib: Annotated[int, Meta(ge=1, le=1 << 16)] = 128
    replay_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 500.0
    stuck_s: _Seconds = 30.0
    first_wait_s: _Seconds = 1.0
    most_wait_s: _Seconds = 300.0
    slow_first_wait_s: _Seconds = 30.0
    slow_most_wait_s: _Seconds = 900.0
    stable_s: _Seconds = 120.0
    command_kib: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    encoding: Literal["json", "cbor"] = "json"
    qos: Literal[0, 1] = 1
    clock: Literal["", "ntp", "gnss", "ptp"] = ""
    home_assistant: str = ""
    sparkplug: str = ""
    telemetry_s: Period = 30.0
    device_s: Period = 60.0
    telemetry_expiry_s: Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)] = 604_800
    results: tuple[ResultOptions, ...] = ()
    limits: LimitOptions = LimitOptions()
    spool: str = ""
    keep: dict[Literal["m", "e", "a", "res"], KeepOptions] = {}
    free_floor_mib: Annotated[float, Meta(ge=0, le=1 << 30)] = 64.0
    commands: tuple[Literal["observe", "infer", "admin"], ...] = ()
    command_expiry_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    commands_per_s: Annotated[float, Meta(gt=0, le=10_000)] = 2.0
    commands_burst: Annotated[int, Meta(ge=1, le=10_000)] = 10

    @property
    def is_on(self) -> bool:
        """Whether anything is said at all."""
        return bool(self.brokers)

    @property
    def addresses(self) -> tuple[Broker, ...]:
        """The brokers, in order."""
        return tuple(map(parse_broker, self.brokers))

    @property
    def device_name(self) -> str:
        """What this device is called in topics."""
        return self.device or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("._-")[:64] or "device"

    @property
    def client_name(self) -> str:
        """What the broker knows this client by."""
        return self.client_id or f"{self.device_name}-agent"

    @property
    def command_filter(self) -> str:
        """Where commands to this device come from."""
        return f"{self.prefix}/v1/{self.device_name}/+/cmd/#"

    @property
    def command_filters(self) -> tuple[str, ...]:
        """Those of the roles whose commands are taken."""
        return tuple(f"{self.prefix}/v1/{self.device_name}/{role}/cmd/+" for role in self.commands)

    @property
    def spool_folder(self) -> Path:
        """Where what waits is."""
        state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        return Path(self.spool) if self.spool else (Path(state) if state else _STATE_FOLDER) / "mqtt"

    @property
    def policies(self) -> dict[str, Policy]:
        """What of each class waits."""
        kept = {}
        for kind, (mib, hours, drop) in _KEPT.items():
            own = self.keep.get(kind, KeepOptions())  # type: ignore[call-overload]
            nbytes = int((mib if own.mib is None else own.mib) * (1 << 20))
            kept[kind] = Policy(nbytes, (hours if own.hours is None else own.hours) * 3600, own.drop or drop)
        return kept

    def __post_init__(self) -> None:
        for each in self.addresses:
            if not (each.tls or self.allow_insecure_network or is_loopback(each.host)):
                raise ValueError(
                    f"broker {each} would be spoken to without TLS over a network: write mqtts://, or accept the risk "
                    "with allow_insecure_network = true under [mqtt]"
                )
        if len(set(self.brokers)) != len(self.brokers):
            raise ValueError("one of the brokers is named twice")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(
                f"prefix {self.prefix!r} cannot begin topics: up to four levels of letters, digits, '.', '_' and '-'"
            )
        if self.device and not _NAME.fullmatch(self.device):
            raise ValueError(
                f"device {self.device!r} cannot be in a topic: letters, digits, '.', '_' and '-', at most 64"
            )
        if self.client_id and not re.fullmatch(r"[!-~]{1,128}", self.client_id, re.ASCII):
            raise ValueError(f"client_id {self.client_id!r} is none: 1 to 128 characters of ASCII without spaces")
        if self.sparkplug and not re.fullmatch(r"[^+#/\0]{1,64}", self.sparkplug):
            raise ValueError(f"sparkplug {self.sparkplug!r} is no group of nodes: at most 64 characters without + # /")
        if self.home_assistant and not _PREFIX.fullmatch(self.home_assistant):
            raise ValueError(f'home_assistant {self.home_assistant!r} is no prefix of topics: "homeassistant"')
        if self.home_assistant and self.encoding != "json":
            raise ValueError('Home Assistant reads JSON: leave out home_assistant, or encoding = "cbor"')
        twice = [each.model for each in self.results if sum(other.model == each.model for other in self.results) > 1]
        if twice:
            raise ValueError(f"results of {twice[0]!r} are named twice")
        self._check_identity()
        for first, most in (("first_wait_s", "most_wait_s"), ("slow_first_wait_s", "slow_most_wait_s")):
            if getattr(self, first) > getattr(self, most):
                raise ValueError(f"{first} is more than {most}")

    def _check_identity(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("a certificate for brokers needs both certificate and key")
        if self.password and not self.username:
            raise ValueError("password is nobody's: it needs username")
        if (self.certificate or self.ca) and self.brokers and not any(each.tls for each in self.addresses):
            raise ValueError("ca and certificate are for TLS, which none of the brokers has: write mqtts://")


def is_loopback(host: str) -> bool:
    """Whether only this machine is there; names other than localhost are taken as elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
