"""What is sent of a message, under both versions and in both encodings."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import cbor2
import pytest
from hypothesis import given

from agent.mqtt.envelope import Encoding, encode
from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Moment, Quality
from agent.mqtt.packet import is_topic
from tests.agent.mqtt.test_message import MESSAGES

NOW = Moment(5 * 10**9, "b", 1_800_000_000 * 10**9, Quality.NTP)
EARLY = Moment(10**9, "b", 77, Quality.UNSYNCED)


def message(**changes: Any) -> Message:
    fields: dict[str, Any] = {
        "component": "rec",
        "kind": Kind.MEASURE,
        "name": "result",
        "body": {"x": 1},
        "moment": EARLY,
        "schema": "result/1",
    }
    return Message(**{**fields, **changes})


def sent(what: Message, **options: Any) -> Any:
    return encode(what, session="s", seq=7, now=NOW, device="car 1", **options)


def test_all_that_is_said_stands_in_properties_or_in_the_envelope() -> None:
    what = message(traceparent="00-a-b-01", expiry_s=60)
    five, four = sent(what, hist=True), sent(what, hist=True, protocol=4)
    assert five.topic == four.topic == "edge/v1/car%201/rec/m/result"
    said = {"schema": "result/1", "session": "s", "seq": "7", "traceparent": "00-a-b-01", "hist": "1"}
    assert dict(five.properties.user) == said
    assert (five.properties.content_type, five.properties.text, five.properties.expiry_s) == (
        "application/json",
        True,
        56,
    )
    beside = json.loads(four.payload).pop("mqtt")
    assert beside == {**said, "seq": 7, "hist": 1, "content_type": "application/json", "expiry_s": 56}
    payload = json.loads(five.payload)
    assert payload == {
        "v": 1, "t": NOW.utc_ns - 4 * 10**9, "tq": "ntp", "mono": 10**9, "boot": "b",
        "restamped": {"t": 77, "tq": "unsynced"}, "body": {"x": 1},
    }  # fmt: skip


def test_json_has_no_nan_and_cbor_has() -> None:
    body = {"x": [math.nan, math.inf, -math.inf, 1.5], "b": b"\xff"}
    said = json.loads(sent(message(body=body)).payload, parse_constant=pytest.fail)["body"]
    assert said == {"x": ["NaN", "Infinity", "-Infinity", 1.5], "b": base64.b64encode(b"\xff").decode()}
    there = cbor2.loads(sent(message(body=body), encoding="cbor").payload)["body"]
    assert math.isnan(there["x"][0])
    assert there["b"] == b"\xff"


@pytest.mark.parametrize("kind", Kind)
def test_only_state_and_meta_are_retained_and_nothing_has_qos_2(kind: Kind) -> None:
    out = sent(message(kind=kind, retain=True), qos=2)
    assert (out.retain, out.qos) == (kind in (Kind.STATE, Kind.META), 1)


def test_an_answer_goes_where_it_is_wanted_and_says_whose_it_is() -> None:
    out = sent(message(kind=Kind.RESULT, response_topic="ops/me", correlation=b"\0\1"))
    assert (out.topic, out.properties.correlation) == ("ops/me", b"\0\1")
    assert dict(out.properties.user).items() >= {"device": "car%201", "stream": "rec/res/result"}.items()
    assert sent(message(kind=Kind.RESULT, response_topic="ops/#")).topic == "edge/v1/car%201/rec/res/result"
    four = json.loads(sent(message(correlation=b"\0\1"), protocol=4).payload)
    assert base64.b64decode(four["mqtt"]["correlation"]) == b"\0\1"


@pytest.mark.parametrize("encoding", ["json", "cbor"])
@pytest.mark.parametrize("protocol", [4, 5])
@given(what=MESSAGES)
def test_every_message_can_be_sent(encoding: Encoding, protocol: int, what: Message) -> None:
    out = sent(what, encoding=encoding, protocol=protocol)
    assert is_topic(out.topic)
    loaded = json.loads(out.payload, parse_constant=pytest.fail) if encoding == "json" else cbor2.loads(out.payload)
    assert loaded["mono"] == what.moment.mono_ns
    assert ("mqtt" in loaded) == (protocol == 4)
