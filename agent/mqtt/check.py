"""`tightfit-agent mqtt check`: what is wrong between this machine and a broker, step by step, as the agent would go.

It has a name of its own, DEVICE-agent-check, so that an agent that runs is not thrown out.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from agent.access.tls import names_of, shown
from agent.errors import ConfigError
from agent.mqtt import client as carrier
from agent.mqtt.backoff import Trouble
from agent.mqtt.brokers import Broker
from agent.mqtt.gate import Fate, Limits, answer_of
from agent.mqtt.identity import Identity, identify
from agent.mqtt.packet import Outgoing
from agent.mqtt.settings import Mqtt
from agent.mqtt.wire import DialError, reach, resolve, secure

_DAY_S = 86_400
_SOON_DAYS = 30
# The year in which all of this was written: a clock before it is one that was never set.
_WRITTEN = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)

State = Literal["ok", "warning", "failed", "skipped"]


class Step(msgspec.Struct, frozen=True):
    """One that was taken, and what to do where it failed."""

    name: str
    state: State
    text: str
    hint: str = ""


class Report(msgspec.Struct, frozen=True):
    """Of one broker."""

    broker: str
    steps: tuple[Step, ...]

    @property
    def is_well(self) -> bool:
        return all(step.state != "failed" for step in self.steps)


# OpenSSL, X509_V_ERR_...
_OF_CERTIFICATE = {
    9: "is this machine's clock right? It says {clock}",
    10: "the broker needs a new one, or this machine's clock is wrong: it says {clock}",
    18: "name it, or the authority that signed it, as ca under [mqtt]",
    19: "name that authority as ca under [mqtt]",
    20: "name the authority that signed it as ca under [mqtt]",
    21: "name the authority that signed it as ca under [mqtt]",
    62: "write the broker as its certificate names it, or have it name {host} (subjectAltName)",
    64: "write the broker as its certificate names it, or have it name {host} (subjectAltName)",
}
# What a broker says of our certificate: alerts of TLS, RFC 8446, section 6.2.
_OF_OURS = {
    "certificate expired": "ours is no longer valid by the broker's clock: renew certificate under [mqtt]",
    "bad certificate": "the broker does not take ours: is it of the authority that it trusts?",
    "unknown ca": "the broker does not know the authority that signed ours",
    "certificate required": "the broker asks for one: give certificate and key under [mqtt]",
    "certificate unknown": "the broker does not take ours: is it of the authority that it trusts?",
    "handshake failure": "the broker may ask for a certificate, or speak an older TLS: see certificate and minimum",
    "protocol version": "the broker speaks no TLS as new as minimum under [mqtt]",
    "revoked": "ours was revoked: renew certificate under [mqtt]",
}
_OF_LOGIN = {
    Trouble.AUTHENTICATION: "see username, password, certificate and client_id under [mqtt]",
    Trouble.RATE: "the broker lets nobody else in for now",
    Trouble.MOVED: "name that one under brokers",
    Trouble.CLOSED: "does a broker of MQTT listen there, with TLS where it is mqtts, and let this client in?",
    Trouble.NETWORK: "does a broker of MQTT listen there, with TLS where it is mqtts, and is it well?",
}


def check(settings: Mqtt, most_s: float = 20.0) -> list[Report]:
    """Of each broker. Raises ConfigError where none is named. `most_s` is for all that follows a login."""
    if not settings.is_on:
        raise ConfigError("no brokers under [mqtt]", 'name one: brokers = ["mqtts://HOST:8883"]')
    return [Report(str(broker), tuple(_steps(settings, broker, most_s))) for broker in settings.addresses]


def as_text(reports: Sequence[Report]) -> str:
    """For people."""
    lines = []
    for report in reports:
        lines.append(report.broker)
        for step in report.steps:
            # The broker has a say in it: what a terminal would obey is shown as an escape.
            text = step.text if step.text.isprintable() else ascii(step.text)
            lines.append(f"  {step.state:8} {step.name:12} {text}")
            lines += [f"  {'':8} {'':12} -> {step.hint}"] if step.hint else []
    return "\n".join(lines)


def as_json(reports: Sequence[Report]) -> str:
    """For programs."""
    found = {"ok": all(each.is_well for each in reports), "brokers": reports}
    return msgspec.json.encode(found).decode("utf-8")


def _steps(settings: Mqtt, broker: Broker, most_s: float) -> list[Step]:
    steps = [_clock(time.time())]
    try:
        identity = identify(settings, broker.tls)
        if settings.certificate and broker.tls:
            steps.append(_own(settings))
        elif broker.tls or settings.username:
            steps.append(Step("identity", "ok", f"username {settings.username!r}" if settings.username else "none"))
    except ConfigError as error:
        return [*steps, Step("identity", "failed", error.message, error.hint)]
    try:
        _dial(settings, broker, identity, steps)
    except DialError as error:
        return [*steps, _undialled(error, broker)]
    return [*steps, *asyncio.run(_session(settings, broker, most_s))]


def _clock(now: float) -> Step:
    said = datetime.datetime.fromtimestamp(now, datetime.timezone.utc)
    if said >= _WRITTEN:
        return Step("clock", "ok", _time(now))
    hint = "certificates are not valid yet by such a clock: set it (NTP), or give the board one with a battery"
    return Step("clock", "warning", f"it says {_time(now)}, so it was never set", hint)


def _time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _own(settings: Mqtt) -> Step:
    try:
        own = shown(settings.certificate, settings.key)
    except ConfigError as error:
        clock = f"renew certificate under [mqtt], or this machine's clock is wrong: it says {_time(time.time())}"
        return Step("identity", "failed", error.message, error.hint or clock)
    if own.early:
        return Step("identity", "warning", "our certificate is not valid yet", f"the clock says {_time(time.time())}")
    days = (own.expires - time.time()) / _DAY_S
    text = f"certificate of {', '.join(own.names)}, valid for {days:.0f} days"
    common = f"CN:{settings.device_name}"
    if common not in own.names:
        hint = f"brokers that go by the name in it will not let it speak of {settings.device_name!r}: see device"
        return Step("identity", "warning", text, hint)
    return Step("identity", "warning" if days < _SOON_DAYS else "ok", text, "renew it" if days < _SOON_DAYS else "")


def _dial(settings: Mqtt, broker: Broker, identity: Identity, steps: list[Step]) -> None:
    """Name, address, TLS. Raises DialError for the step that failed."""
    addresses = resolve(broker)
    steps.append(Step("dns", "ok", f"{broker.host} is {', '.join(addresses[:4])}"))
    began = time.monotonic()
    sock = reach(broker, addresses, settings.connect_s)
    took_ms = (time.monotonic() - began) * 1000
    steps.append(Step("tcp", "ok", f"connected to {sock.getpeername()[0]} port {broker.port} in {took_ms:.0f} ms"))
    if identity.context is None:
        sock.close()
        steps.append(Step("tls", "skipped", "mqtt:// is without"))
        return
    with secure(sock, broker, identity.context) as secured:
        steps.append(_theirs(secured))


def _theirs(secured: ssl.SSLSocket) -> Step:
    fields: Any = secured.getpeercert() or {}
    days = (ssl.cert_time_to_seconds(str(fields["notAfter"])) - time.time()) / _DAY_S
    text = (
        f"{secured.version()}, the broker has a certificate of {', '.join(names_of(fields))}, valid for {days:.0f} days"
    )
    soon = days < _SOON_DAYS
    return Step("tls", "warning" if soon else "ok", text, "the broker needs a new one soon" if soon else "")


def _undialled(error: DialError, broker: Broker) -> Step:
    hints = {
        "dns": "is the name right, and does this machine have a network and a name server?",
        "tcp": "is the broker up, is the port right, and does a firewall let it through?",
        "tls": "does the broker speak TLS on that port? Without it is mqtt://",
    }
    hint = _OF_CERTIFICATE.get(error.verify_code, "") or _hint_of_ours(str(error)) or hints[error.step]
    return Step(error.step, "failed", str(error), hint.format(clock=_time(time.time()), host=broker.host))


def _hint_of_ours(text: str) -> str:
    return next((hint for words, hint in _OF_OURS.items() if words in text), "")


class _Talk:
    """What the broker says of a login, a message and a subscription."""

    def __init__(self) -> None:
        self.opened: carrier.Opened | None = None
        self.ended: carrier.Ended | None = None
        self.settled: carrier.Settled | None = None
        self.subscribed: carrier.Subscribed | None = None
        self.changed = asyncio.Event()

    def happened(self, events: Sequence[carrier.Event]) -> None:
        for event in events:
            if isinstance(event, carrier.Opened):
                self.opened = event
            elif isinstance(event, carrier.Ended):
                self.ended = event
            elif isinstance(event, carrier.Settled):
                self.settled = event
            elif isinstance(event, carrier.Subscribed):
                self.subscribed = event
        self.changed.set()

    async def until(self, done: Callable[[], object], seconds: float) -> None:
        """Wait until it is, or the connection ended, or for so long."""
        end = time.monotonic() + seconds
        while not done() and self.ended is None and (left := end - time.monotonic()) > 0:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except asyncio.TimeoutError:
                return


async def _session(settings: Mqtt, broker: Broker, most_s: float) -> list[Step]:
    """All behind TLS, in MQTT 5 first where it may be either."""
    protocols = {"auto": (5, 4), "5": (5,), "3.1.1": (4,)}[settings.protocol]
    steps: list[Step] = []
    for protocol in protocols:
        steps = await _talk(settings, broker, protocol, most_s)
        if steps[0].state != "failed" or not steps[0].text.startswith("MQTT 5 is not"):
            break
    return steps


async def _talk(settings: Mqtt, broker: Broker, protocol: int, most_s: float) -> list[Step]:
    talk = _Talk()
    client = carrier.Client(asyncio.get_running_loop(), talk.happened)
    client.start()
    try:
        client.tell(
            carrier.Connect(
                1, broker, protocol, f"{settings.client_name}-check", lambda: identify(settings, broker.tls),
                settings.keepalive_s, settings.connect_s, 0, None, 0, (settings.command_filter,),
                settings.command_kib << 10,
            )
        )  # fmt: skip
        await talk.until(lambda: talk.opened, 3 * settings.connect_s)
        if talk.opened is None:
            return [_not_opened(talk.ended)]
        limits = talk.opened.limits
        topic = f"{settings.prefix}/v1/{settings.device_name}/agent/m/check"
        client.tell(carrier.Send(1, 0, Outgoing(topic, b'{"check":true}')))
        await talk.until(lambda: talk.settled and talk.subscribed, most_s)
        said = talk.ended
        client.tell(carrier.Leave(1))
        await talk.until(lambda: False, settings.connect_s)
        login = Step("login", "ok", f"MQTT {'5' if protocol == 5 else '3.1.1'}, as {settings.client_name}-check")
        return [
            login,
            _limits(limits, settings),
            _published(talk, topic, limits, said),
            _followed(talk, settings, said),
        ]
    finally:
        client.end()
        await asyncio.to_thread(client.join, settings.connect_s)


def _not_opened(ended: carrier.Ended | None) -> Step:
    if ended is None:
        return Step("login", "failed", "no answer", _OF_LOGIN[Trouble.NETWORK])
    if ended.code == 0x84:
        return Step("login", "failed", f"MQTT 5 is not spoken there: {ended.text}", 'set protocol = "3.1.1"')
    hint = _hint_of_ours(ended.text) or _OF_LOGIN.get(ended.trouble, "")
    code = f" (0x{ended.code:02X})" if ended.code >= 0 else ""
    name = "identity" if ended.trouble is Trouble.CERTIFICATE else "login"
    where = f", see {ended.reference}" if ended.reference else ""
    return Step(name, "failed", f"{ended.text}{code}{where}", hint)


def _limits(limits: Limits, settings: Mqtt) -> Step:
    packet = f"packets of at most {limits.maximum_packet} bytes" if limits.maximum_packet else "packets of any size"
    text = (
        f"{limits.receive_maximum} messages at once, {packet}, QoS {limits.maximum_qos} at most, "
        f"keep-alive {limits.keepalive_s} s, {'retains' if limits.retains else 'retains nothing'}"
    )
    hints = []
    if limits.maximum_packet and limits.maximum_packet < settings.message_kib << 10:
        hints.append(f"messages up to message_kib = {settings.message_kib} are not all taken: larger ones are given up")
    if not limits.retains:
        hints.append("whoever subscribes later does not see the state of this device")
    if limits.maximum_qos == 0:
        hints.append("nothing is acknowledged: what is on its way when the connection ends is lost")
    return Step("limits", "warning" if hints else "ok", text, "; ".join(hints))


def _published(talk: _Talk, topic: str, limits: Limits, ended: carrier.Ended | None) -> Step:
    if talk.settled is None:
        text = ended.text if ended is not None else "the broker does not acknowledge it"
        return Step("publish", "failed", f"{topic}: {text}", "does the broker let this client publish there (ACL)?")
    answer = answer_of(talk.settled.code)
    if answer.fate is not Fate.DELIVERED:
        text = f"{topic}: {answer.reason} (0x{talk.settled.code:02X})"
        return Step("publish", "failed", text, "let this client write to PREFIX/v1/DEVICE/# in the broker's ACL")
    if limits.protocol != 5:
        return Step("publish", "ok", f"{topic}: acknowledged (3.1.1 does not tell whether it was allowed)")
    note = ", though nobody listens" if answer.reason == "no_subscribers" else ""
    return Step("publish", "ok", f"{topic}: acknowledged{note}")


def _followed(talk: _Talk, settings: Mqtt, ended: carrier.Ended | None) -> Step:
    where = settings.command_filter
    if talk.subscribed is None:
        text = ended.text if ended is not None else "no answer"
        return Step("subscribe", "failed", f"{where}: {text}", "does the broker let this client subscribe there (ACL)?")
    refused = [code for code in talk.subscribed.codes if code >= 0x80]
    if refused:
        hint = "let this client read PREFIX/v1/DEVICE/+/cmd/# in the broker's ACL"
        return Step("subscribe", "failed", f"{where}: refused (0x{refused[0]:02X})", hint)
    return Step("subscribe", "ok", f"{where}: commands come from there")
