"""A subscriber that knows only docs/mqtt: it reads what mosquitto_sub prints, and the schemas."""

from __future__ import annotations

import base64
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import cbor2
import pytest
from jsonschema import Draft202012Validator, ValidationError

from agent.mqtt.envelope import Encoding, encode
from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Moment, Quality
from agent.mqtt.packet import Outgoing
from tests.support.brokers import mosquitto

SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in Path("docs/mqtt/schemas").glob("*.json")}
NOW = Moment(9 * 10**9, "b", 1_800_000_000 * 10**9, Quality.NTP)
MADE = Moment(10**9, "b", 5, Quality.UNSYNCED)
COUNTS = {"produced": 9, "delivered": 5, "queued": 3, "dropped": {"oldest": 1}}
OUTPUTS = [
    {"name": "y", "datatype": "FP32", "shape": [2], "data": [0.5, 1.5]},
    {"name": "r", "datatype": "FP32", "shape": [1], "raw": b"\0\0\xc0\x7f"},
    {"name": "z", "datatype": "UINT8", "shape": [9], "ref": {"bytes": 9, "sha256": "0" * 64, "href": "/v2"}},
]
BODIES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "birth-1": (Kind.STATE, {"status": "online", "session": "s", "models": [{"name": "rec", "version": "1"}]}),
    "result-1": (Kind.MEASURE, {"model": "m", "version": "1", "number": 3, "epoch": "e", "outputs": OUTPUTS}),
    "memory-1": (Kind.MEASURE, {"anonymous_bytes": 1, "file_bytes": 2}),
    "queue-1": (Kind.MEASURE, {"waiting": 0, "spool": {"m": COUNTS}}),
    "latency-1": (Kind.MEASURE, {"model": "m", "total": {"count": 0, "p99_ms": math.nan}}),
    "device-1": (Kind.MEASURE, {"temperatures_c": {"cpu": 61.5}, "throttled": False, "clock_quality": "ntp"}),
    "alarm-1": (Kind.ALARM, {"name": "hot", "raised": True, "text": "it is hot", "value": math.inf}),
    "event-1": (Kind.EVENT, {"event": "reload", "model": "m"}),
    "gap-1": (Kind.EVENT, {"stream": "*", "session": "*", "first": 0, "last": 4, "count": 5, "reason": "oldest"}),
    "response-1": (Kind.RESULT, {"id": "k", "verb": "ping", "state": "done", "result": {}}),
    "meta-1": (Kind.META, {"title": "Results", "fields": {"figure": {"unit": "1"}}}),
}


def check(name: str, value: object) -> None:
    Draft202012Validator(SCHEMAS[name]).validate(value)


def as_json(value: Any) -> Any:
    """CBOR as its JSON would be: the schemas are about that."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list) else value


def publish(port: int, out: Outgoing, protocol: int, file: Path) -> None:
    file.write_bytes(out.payload)
    command = ["mosquitto_pub", "-p", str(port), "-q", str(out.qos), "-t", out.topic, "-f", str(file)]
    if protocol == 5:
        command += ["-V", "mqttv5", "-D", "publish", "content-type", out.properties.content_type]
        for key, value in out.properties.user:
            command += ["-D", "publish", "user-property", key, value]
    subprocess.run([*command, *(["-r"] if out.retain else [])], check=True, timeout=60)


def understood(user: dict[str, str], payload: bytes) -> tuple[str, int, dict[str, Any]]:
    """(schema, seq, payload) of one line of mosquitto_sub, by what docs/mqtt.md says."""
    loaded = json.loads(payload, parse_constant=pytest.fail) if payload[:1] == b"{" else as_json(cbor2.loads(payload))
    check("envelope-1", loaded)
    beside = loaded.get("mqtt", user)
    assert ("mqtt" in loaded) != bool(user)
    return beside["schema"].replace("/", "-"), int(beside["seq"]), loaded


@pytest.mark.parametrize(("protocol", "encoding"), [(5, "json"), (5, "cbor"), (4, "json"), (4, "cbor")])
def test_every_kind_of_message_is_understood(protocol: int, encoding: Encoding, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        command = ["mosquitto_sub", "-p", str(broker.port), "-V", "mqttv5", "-i", "reader", "-c", "-q", "1"]
        session = ["-t", "edge/v1/+/+/+/+"]
        # The broker keeps what comes from here on.
        subprocess.run([*command, *session, "-E"], check=True, timeout=60)
        for seq, (schema, (kind, body)) in enumerate(BODIES.items()):
            name = "+/#" if kind is Kind.ALARM else schema
            message = Message("rec", kind, name, body, MADE, schema.replace("-", "/"))
            options: dict[str, Any] = {"protocol": protocol, "encoding": encoding, "now": NOW, "device": "car"}
            publish(broker.port, encode(message, session="s", seq=seq, **options), protocol, tmp_path / "payload")
        many = [*command, *session, "-C", str(len(BODIES)), "-W", "60", "-F", "%x %P"]
        lines = subprocess.run(many, check=True, capture_output=True, text=True, timeout=90).stdout.splitlines()
    seen = []
    for line in lines:
        payload, _, rest = line.partition(" ")
        schema, seq, loaded = understood(dict(each.split(":", 1) for each in rest.split()), bytes.fromhex(payload))
        check(schema, loaded["body"])
        assert loaded["restamped"] == {"t": 5, "tq": "unsynced"}
        seen.append((schema, seq))
    assert seen == [(schema, seq) for seq, schema in enumerate(BODIES)]


def test_every_schema_is_one_and_has_an_example() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    assert set(SCHEMAS) == {*BODIES, "envelope-1", "command-1"}
    check("command-1", {"v": 1, "id": "k", "args": {"model": "m"}})


@pytest.mark.parametrize("name", sorted({*SCHEMAS} - {"queue-1", "device-1"}))
def test_a_schema_refuses_what_is_nothing_of_it(name: str) -> None:
    with pytest.raises(ValidationError):
        check(name, {})
