"""The agent's configuration: strict TOML. Every limit has one owner, and it stands here with its reason."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.errors import ConfigError
from targets.errors import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Positive = Annotated[int, Meta(ge=1, le=1 << 31)]

# A configuration is a page of text.
MAX_CONFIG_BYTES = 1 << 20


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to listen and what one client may use.

    `body_bytes` caps what the bundle's contract already implies; it holds before and after decompression. `send_s` is
    how long a large answer may take to leave: it goes out of its slot, which it holds meanwhile.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    allow_insecure_network: bool = False
    body_bytes: Positive = 64 << 20
    header_bytes: Annotated[int, Meta(ge=1024, le=1 << 20)] = 8190
    headers: Annotated[int, Meta(ge=16, le=10_000)] = 64
    connections: Positive = 512
    keepalive_s: Seconds = 75.0
    body_s: Seconds = 30.0
    send_s: Seconds = 30.0


class Requests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests wait and for how long.

    As many as the bundle's plan has slots are in memory at once. `queue_length` more may wait for a slot: of those
    only the head was read, so each costs a connection and what its socket had ready (at most 384 KiB). `timeout_s`
    is the deadline of a request that names none, and the latest it may name. `drain_s` bounds how long a stop waits
    for answers.
    """

    queue_length: Positive = 64
    timeout_s: Seconds = 30.0
    drain_s: Seconds = 20.0


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine process. `threads` compute one operator together; 0 means one per core.

    A pass that takes longer than `hang_s`, and than twenty times the longest one before, is taken for a hang. An engine
    that died or hung is started again, up to `restarts` times within `restart_window_s`; then the agent ends.

    `residency` says where every segment's weights are, `plan` that it is as the bundle's plan has it. What mapped and
    streamed segments need is looked for in `cache` (empty: in the default places, see `tightfit-agent finalise
    --help`) and made when it is not there if `finalise_on_start`.
    """

    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    load_s: Seconds = 300.0
    hang_s: Seconds = 10.0
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 5
    restart_window_s: Seconds = 300.0
    residency: Literal["plan", "heap", "mapped", "streamed", "unpacked"] = "plan"
    cache: str = ""
    finalise_on_start: bool = False

    @property
    def intra_op_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the machine keeps for everything that is not the agent."""

    os_reserve_mib: Annotated[int, Meta(ge=0)] = 256


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs go to stderr, one event a line. `auto` writes for people on a terminal and JSON elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. `bundle` is the folder to serve."""

    bundle: str = ""
    http: Http = Http()
    requests: Requests = Requests()
    engine: EngineOptions = EngineOptions()
    memory: Memory = Memory()
    log: Log = Log()


def load_config(path: Path | None, overrides: dict[str, dict[str, Any]]) -> Config:
    """Read the file (if any), let `overrides` (section -> key -> value; "" is the top) win, check everything."""
    fields = _read(path) if path else {}
    for section, values in overrides.items():
        given = {key: value for key, value in values.items() if value is not None}
        if not section:
            fields.update(given)
        elif given and isinstance(fields.setdefault(section, {}), dict):
            fields[section].update(given)
    where = str(path) if path else "the flags"
    try:
        config = msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", _hint(str(error))) from None
    if not config.bundle:
        raise ConfigError("no bundle to serve", 'give --bundle OUT.tfb, or bundle = "..." in the configuration')
    check_exposure(config.http)
    return config


def check_exposure(http: Http) -> None:
    """Refuse to serve a network without encryption and authentication unless told to."""
    if http.allow_insecure_network or is_loopback(http.host):
        return
    raise ConfigError(
        f"host {http.host} can be reached from the network, and this version has neither TLS nor authentication",
        "listen on 127.0.0.1, or accept the risk with --allow-insecure-network "
        "(allow_insecure_network = true under [http])",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; names other than localhost are taken as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"configuration {path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        fields: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from None
    return fields


SECTIONS: dict[str, Any] = {
    "http": Http,
    "requests": Requests,
    "engine": EngineOptions,
    "memory": Memory,
    "log": Log,
}


def _hint(message: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?(\w*)`)?", message)
    if not unknown:
        return "see agent.toml.example for every key"
    return did_you_mean(unknown[1], SECTIONS.get(unknown[2] or "", Config).__struct_fields__)
