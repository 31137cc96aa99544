"""The agent's configuration: strict TOML. Every limit has one owner, and it stands here with its reason."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from agent.errors import ConfigError
from agent.mqtt.settings import Mqtt
from targets.bundle import NAME
from targets.errors import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Bound = Annotated[int, Meta(ge=0, le=1 << 31)]
Priority = Annotated[int, Meta(ge=1, le=255)]


class Tcp(NamedTuple):
    """An address of TCP. `scheme` is "http" or "https" where it was written, or "": as [tls] has it."""

    host: str
    port: int
    scheme: str = ""

    def is_secure(self, tls: bool) -> bool:
        """Whether it speaks TLS, which those do that say nothing where there is `tls`."""
        return self.scheme == "https" or (tls and not self.scheme)


Address = Tcp | Path

DEFAULT_PRIORITY = 128
MAX_PORT = 65_535

# Of a model that keeps the newest image: that one, and older ones that somebody is being sent.
PICTURES = 3

# A configuration is a page of text.
MAX_CONFIG_BYTES = 1 << 20


def _address(text: str) -> Address:
    if text.startswith("unix:/"):
        return Path(text.removeprefix("unix:"))
    found = re.fullmatch(r"(?:(https?)://)?(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text, re.ASCII)
    if found is None or int(found[4]) > MAX_PORT:
        raise ValueError(
            f"{text!r} is no address to listen on: HOST:PORT, [IPV6]:PORT, https://HOST:PORT or unix:/PATH"
        )
    return Tcp(found[2] or found[3], int(found[4]), found[1] or "")


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to listen and what one client may use.

    `listen` names addresses in place of `host` and `port`: "127.0.0.1:8080", "[::1]:8080", "unix:/run/agent.sock"; the
    file of a Unix socket has `unix_mode`. Where [tls] has a certificate all but Unix sockets speak TLS, unless "http://"
    stands before them. After `tcp_keepalive_s` of silence TCP asks whether the peer is still there,
    and after as long again without an answer the connection is closed. A client that sends FIN behind a request has
    left, unless that request says `Connection: close`: then it waits for the answer. With `half_close` it always does.

    `body_bytes` caps what the bundle's contract already implies; it holds before and after decompression. `send_s` is
    how long a large answer may take to leave: it goes out of its slot, which it holds meanwhile.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=MAX_PORT)] = 8080
    listen: tuple[str, ...] = ()
    unix_mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o660
    tcp_keepalive_s: Annotated[int, Meta(ge=4, le=32_767)] = 60
    half_close: bool = False
    allow_insecure_network: bool = False
    body_bytes: Positive = 64 << 20
    header_bytes: Annotated[int, Meta(ge=1024, le=1 << 20)] = 8190
    headers: Annotated[int, Meta(ge=16, le=10_000)] = 64
    connections: Positive = 512
    keepalive_s: Seconds = 75.0
    body_s: Seconds = 30.0
    send_s: Seconds = 30.0

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All that is listened on: of TCP, or the path of a Unix socket."""
        return tuple(map(_address, self.listen)) or (Tcp(self.host, self.port),)

    def __post_init__(self) -> None:
        for text in self.listen:
            _address(text)


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encryption of what comes over TCP (docs/security.md).

    `certificate` (with those between it and its root behind it) and `key` are PEM files: paths, or `credential:NAME`
    for what systemd hands over. `minimum` is the oldest version that is spoken. Who connects has `handshake_s` to show
    that it speaks TLS, and for all of the handshake.

    With `client_ca`, the certificates of authorities, clients may show certificates of theirs, or have to where
    `client_certificate` is `required`; `crl` lists those that are revoked.
    """

    certificate: str = ""
    key: str = ""
    minimum: Literal["1.2", "1.3"] = "1.2"
    client_ca: str = ""
    client_certificate: Literal["optional", "required"] = "optional"
    crl: str = ""
    handshake_s: Seconds = 10.0

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("TLS needs both certificate and key")
        if self.client_ca and not self.certificate:
            raise ValueError("client_ca is for TLS, which needs certificate and key")
        if not self.client_ca and (self.crl or self.client_certificate == "required"):
            raise ValueError("certificates of clients need client_ca, by which they are judged")


RoleName = Literal["infer", "observe", "admin"]


class AccessOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may do what (docs/security.md).

    Whom nobody knows has the roles `anonymous` where he comes from this machine, over the loopback or a Unix socket,
    and none where he comes from elsewhere, unless `allow_insecure_network` is said. `tokens` is the file of bearer
    tokens, by path or as `credential:NAME`. It and certificates are looked at every `watch_s` for whether they were
    replaced; what is connected stays as it is.
    """

    anonymous: tuple[RoleName, ...] = ("infer", "observe", "admin")
    tokens: str = ""
    watch_s: Seconds = 10.0


class CallerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody who is known: by a bearer token, which the file of tokens says is his, by his certificate
    (`URI:...`, `DNS:...` or `CN:...`, as is in it), or, over a Unix socket, by the user or a group of his process. For
    each role the models that he has it for; "*" are all, and what concerns no model alone.
    """

    name: str
    certificates: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    observe: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot be a caller's name: letters, digits, '.', '_' and '-', at most 100")
        for each in self.certificates:
            if not re.fullmatch(r"(?:URI|DNS|CN):.+", each):
                raise ValueError(f"{each!r} is no name in a certificate: URI:..., DNS:... or CN:...")
        for model in (*self.infer, *self.observe, *self.admin):
            if model != "*" and not NAME.fullmatch(model):
                raise ValueError(f"caller {self.name!r}: {model!r} cannot be a model's name; '*' are all models")


class Requests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests wait and for how long.

    As many as the bundle's plan has slots are in memory at once. `queue_length` more may wait for a slot of their
    model, `client_queue_length` of them of one client (0: all of them): of those only the head was read, so each costs
    a connection and what its socket had ready (at most 384 KiB). `timeout_s` is the deadline of a request that names
    none, and the latest it may name. `drain_s` bounds how long a stop waits for answers. A sequence, which keeps a
    slot with its state, is ended when nothing of it came for `sequence_idle_s`.
    """

    queue_length: Positive = 64
    client_queue_length: Bound = 0
    timeout_s: Seconds = 30.0
    drain_s: Seconds = 20.0
    sequence_idle_s: Seconds = 60.0


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model to serve: its bundle (a folder), and the name it is asked for by, where not by the bundle's own.

    Where models compete for the accelerator, each has it in proportion to its `weight`. `priority` is that of a request
    that names none: 1 is the highest, 255 the lowest. The bounds are as under [requests], whose are taken where they
    are 0. `cache_mib` is for answers that are kept for requests that come again: only of a model that gives equal
    inputs equal outputs. `results_mib` is for its newest results, which then anyone who may connect can follow: they
    are the answers to all clients. 0: nobody can. `picture_kib` is the largest image of which the newest is kept beside
    them, for who follows them to see what was answered; 0: none is. `lighter` names another of the models, which
    answers in its place under pressure.
    """

    bundle: str
    name: str = ""
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    priority: Priority = DEFAULT_PRIORITY
    queue_length: Bound = 0
    client_queue_length: Bound = 0
    cache_mib: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    results_mib: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    picture_kib: Annotated[int, Meta(ge=0, le=64 << 10)] = 0
    lighter: str = ""

    @property
    def cache_bytes(self) -> int:
        return self.cache_mib << 20

    @property
    def results_bytes(self) -> int:
        return self.results_mib << 20

    @property
    def picture_bytes(self) -> int:
        return self.picture_kib << 10

    @property
    def kept_bytes(self) -> int:
        """Memory of the gateway's for answers, in whichever way they are kept, and for pictures that they are about."""
        return self.cache_bytes + self.results_bytes + PICTURES * self.picture_bytes

    def __post_init__(self) -> None:
        if not self.bundle:
            raise ValueError("a model needs a bundle")
        if self.picture_kib and not self.results_mib:
            raise ValueError("picture_kib shows what results are about: it needs results_mib")
        if self.name and not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot be a model's name: letters, digits, '.', '_' and '-', at most 100")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Streams of records, and those who follow results or events (docs/streams.md).

    `most` may be open at once. Each costs 64 KiB of a record that has no slot yet, what its socket had ready (at most
    384 KiB), outputs of less than 64 KiB each of the `in_flight` records that are on their way at once, and
    `unread_kib` of what its client did not read yet; all else stands in slots.

    When nothing else was sent for `heartbeat_s`, a heartbeat is. A stream whose client sends nothing for `idle_s`, not
    even heartbeats, and waits for nothing, is ended; within a record it has `body_s` of [http]. A reader that takes
    nothing for `patience_s`, while as much waits for it as may, is given up.
    """

    most: Positive = 32
    in_flight: Annotated[int, Meta(ge=1, le=1024)] = 8
    unread_kib: Annotated[int, Meta(ge=64, le=1 << 20)] = 1024
    heartbeat_s: Seconds = 15.0
    idle_s: Seconds = 300.0
    patience_s: Seconds = 5.0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may use, and how slow it may be (docs/limits.md).

    A head must be there within `head_s` of its first byte. Bodies, records and answers must move on: in every `pace_s`
    at `bytes_per_s` on average (0: at any rate). `send_buffer_kib` bounds what the kernel keeps of an answer for a
    client that does not read: left to itself it would keep megabytes.

    One client, which is a caller by name or an address, may have `client_connections` and `client_streams` (0: all that
    there are), and `client_requests` that go on or wait; it may ask `requests_per_s` times a second, after `burst` at
    once (0: any number). An ensemble counts once for every member. Where all connections are taken, the client that has
    most gives an idle one up for one that has fewer.

    A version of a model that failed `breaker_failures` times in a row (0: no matter how often), its engine's deaths
    counted, is asked nothing for `breaker_s`; then one request may try. Failures of one client keep out only that one.
    """

    head_s: Seconds = 10.0
    bytes_per_s: Annotated[int, Meta(ge=0, le=1 << 30)] = 240
    pace_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    send_buffer_kib: Annotated[int, Meta(ge=16, le=1 << 16)] = 256
    client_connections: Bound = 0
    client_streams: Bound = 0
    client_requests: Bound = 0
    requests_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    burst: Positive = 10
    breaker_failures: Bound = 10
    breaker_s: Seconds = 5.0


class EnsembleOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several of the models under one name, asked with one request: `models` are their names."""

    name: str
    models: tuple[str, ...]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot be an ensemble's name: letters, digits, '.', '_' and '-'")
        if not self.models or len(set(self.models)) != len(self.models):
            raise ValueError(f"ensemble {self.name!r} needs models, each once")


class DegradationOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast service is reduced under pressure: after pressure has lasted for `rise_s`; and how slowly it comes back:
    by one level after `hold_s` without."""

    rise_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    hold_s: Seconds = 30.0


class RepositoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether clients may load and unload models (`control`), and the folders whose bundles they may load."""

    control: bool = False
    folders: tuple[str, ...] = ()


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine process. `threads` compute one operator together; 0 means one per core.

    A pass that takes longer than `hang_s`, and than twenty times the longest one before, is taken for a hang. An engine
    that died or hung is started again, up to `restarts` times within `restart_window_s`; then the agent ends.

    `inline` has it run inside the gateway's process, for one model on a board where every MiB counts: what ends the
    runtime then ends the agent, and a pass that hangs is not ended.

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
    inline: bool = False

    @property
    def intra_op_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the machine keeps for everything that is not the agent."""

    os_reserve_mib: Annotated[int, Meta(ge=0)] = 256


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs go to stderr, one event a line. `auto` writes for people on a terminal and JSON elsewhere.

    `requests` says of which requests there is a line: of those that were not answered (of a flood of them, few), of
    all, or of none (docs/observability.md).
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    requests: Literal["failures", "all", "none"] = "failures"


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, for an OpenTelemetry collector (docs/observability.md; needs the extra `otel`).

    They are sent to `endpoint` over OTLP/HTTP: "http://127.0.0.1:4318/v1/traces"; empty: nowhere. A request has spans
    where its `traceparent` says that its trace is kept; of those without one, a part of `ratio`. At most `queue_length`
    spans wait to be sent, more are dropped: each is about 2 KiB.
    """

    endpoint: str = ""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    queue_length: Annotated[int, Meta(ge=16, le=1 << 16)] = 2048

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint)
        if self.endpoint and not (url.scheme in ("http", "https") and url.hostname):
            raise ValueError(f"endpoint {self.endpoint!r} is no URL of a collector: http://HOST:4318/v1/traces")
        if url.username is not None:
            raise ValueError("endpoint holds a name or a password: give them as OTEL_EXPORTER_OTLP_HEADERS")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. `bundle` is the folder to serve where it is one; several stand under `models`."""

    bundle: str = ""
    models: tuple[ModelOptions, ...] = ()
    ensembles: tuple[EnsembleOptions, ...] = ()
    http: Http = Http()
    tls: Tls = Tls()
    access: AccessOptions = AccessOptions()
    callers: tuple[CallerOptions, ...] = ()
    requests: Requests = Requests()
    streams: StreamOptions = StreamOptions()
    limits: Limits = Limits()
    repository: RepositoryOptions = RepositoryOptions()
    degradation: DegradationOptions = DegradationOptions()
    engine: EngineOptions = EngineOptions()
    memory: Memory = Memory()
    log: Log = Log()
    tracing: Tracing = Tracing()
    mqtt: Mqtt = Mqtt()

    @property
    def served(self) -> tuple[ModelOptions, ...]:
        """Every model to serve."""
        return self.models or (ModelOptions(self.bundle),)


def load_config(path: Path | None, overrides: dict[str, dict[str, Any]]) -> Config:
    """Read the file (if any), let `overrides` (section -> key -> value; "" is the top) win, check everything."""
    fields = _read(path) if path else {}
    for section, values in overrides.items():
        given = {key: value for key, value in values.items() if value is not None}
        if not section:
            if "bundle" in given:
                fields.pop("models", None)
            fields.update(given)
        elif given and isinstance(fields.setdefault(section, {}), dict):
            if section == "http" and given.keys() & {"host", "port"}:
                fields[section].pop("listen", None)
            fields[section].update(given)
    where = str(path) if path else "the flags"
    try:
        config = msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", _hint(str(error))) from None
    if not (config.bundle or config.models):
        raise ConfigError("no bundle to serve", 'give --bundle OUT.tfb, or bundle = "..." in the configuration')
    if config.engine.inline and (len(config.models) > 1 or config.repository.control):
        raise ConfigError(
            f"{where}: an inline engine serves one model, always the same",
            "leave out inline under [engine], or all of [[models]] but one, and control under [repository]",
        )
    if config.bundle and config.models:
        raise ConfigError(f"{where}: both bundle and [[models]]", "name each bundle under [[models]]")
    if config.http.listen and isinstance(http := fields.get("http"), dict) and http.keys() & {"host", "port"}:
        raise ConfigError(f"{where}: both listen and host or port under [http]", "name each address in listen")
    _check_access(config, where)
    check_exposure(config)
    return config


def _check_access(config: Config, where: str) -> None:
    secure = [each for each in config.http.listen if each.startswith("https://")]
    if secure and not config.tls.certificate:
        raise ConfigError(f"{where}: {secure[0]} needs a certificate", "give certificate and key under [tls]")
    names = [caller.name for caller in config.callers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{where}: two [[callers]] are named {twice[0]!r}", "give all that tells who it is in one")
    if config.access.tokens and not names:
        raise ConfigError(f"{where}: tokens under [access], and no [[callers]] whose they are", "see docs/security.md")
    for caller in config.callers:
        if caller.certificates and not config.tls.client_ca:
            raise ConfigError(
                f"{where}: caller {caller.name!r} is known by a certificate, and nothing tells which are genuine",
                "give client_ca under [tls]",
            )


def check_exposure(config: Config) -> None:
    """Refuse to serve a network without encryption and authentication unless told to."""
    if config.http.allow_insecure_network:
        return
    known = bool(config.access.tokens) or any(caller.certificates for caller in config.callers)
    for address in config.http.addresses:
        if not isinstance(address, Tcp) or is_loopback(address.host):
            continue
        missing = [] if address.is_secure(bool(config.tls.certificate)) else ["TLS"]
        missing += [] if known else ["authentication"]
        if missing:
            raise ConfigError(
                f"host {address.host} can be reached from the network, and has "
                + ("neither TLS nor authentication" if len(missing) == 2 else f"no {missing[0]}"),
                "listen on 127.0.0.1, set up [tls] and [[callers]] (docs/security.md), or accept the risk with "
                "--insecure (allow_insecure_network = true under [http])",
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
    "tls": Tls,
    "access": AccessOptions,
    "callers": CallerOptions,
    "requests": Requests,
    "streams": StreamOptions,
    "limits": Limits,
    "repository": RepositoryOptions,
    "models": ModelOptions,
    "ensembles": EnsembleOptions,
    "degradation": DegradationOptions,
    "engine": EngineOptions,
    "memory": Memory,
    "log": Log,
    "tracing": Tracing,
    "mqtt": Mqtt,
}


def _hint(message: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?(\w*)(?:\[\d+\])?`)?", message)
    if not unknown:
        return "see agent.toml.example for every key"
    return did_you_mean(unknown[1], SECTIONS.get(unknown[2] or "", Config).__struct_fields__)
