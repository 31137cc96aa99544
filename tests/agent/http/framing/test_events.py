"""Events as a browser reads them: WHATWG HTML, section 9.2.6."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import RefusedError
from agent.http.framing.events import EventEncoder
from agent.http.framing.records import Failure, Lost, failure, overflow
from agent.results import Position, parse_position
from targets.errors import ContractError


def read_events(data: bytes) -> tuple[list[tuple[str, str, str]], int | None]:
    """((id, type, data) of each event, the reconnection time), by the algorithm of the standard."""
    events: list[tuple[str, str, str]] = []
    last_id, kind, lines, retry = "", "", list[str](), None
    for line in data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if lines:
                events.append((last_id, kind or "message", "\n".join(lines)))
            kind, lines = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            last_id = value
        elif field == "event":
            kind = value
        elif field == "data":
            lines.append(value)
        elif field == "retry":
            retry = int(value)
    return events, retry


def test_events() -> None:
    encoder = EventEncoder("5f3a", 2000)
    records = [Lost(3, 9, 7), failure(10, "a", ContractError("no")), overflow(10)]
    stream = encoder.opening + encoder.heartbeat.join([b"", *map(encoder.encode, records), b""])
    events, retry = read_events(stream)
    assert retry == 2000
    assert [(at, kind) for at, kind, _ in events] == [("5f3a-9", "lost"), ("5f3a-10", "error"), ("5f3a-10", "overflow")]
    assert [json.loads(data)["type"] for *_, data in events] == ["lost", "error", "overflow"]
    assert parse_position(events[0][0]) == Position("5f3a", 9)


@given(st.text())
def test_no_text_ends_an_event(text: str) -> None:
    record = Failure(seq=1, id=text, status=500, reason="fault", error=text)
    ((_, _, data),), _ = read_events(EventEncoder("e", 1).encode(record))
    said: dict[str, Any] = json.loads(data)
    assert (said["id"], said["error"]) == (text, text)


def test_events_have_no_place_for_bytes() -> None:
    with pytest.raises(RefusedError, match="no place for binary outputs"):
        EventEncoder("e", 1).encode(Lost(1, 1, 1), [memoryview(b"a")])
