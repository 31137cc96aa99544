"""A JSON text per line."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason, RefusedError
from agent.http.framing.decoder import FramingError, Message
from agent.http.framing.lines import LineDecoder, LineEncoder
from agent.http.framing.records import Lost


def bodies(data: bytes, limit: int = 10_000) -> list[bytes]:
    decoder = LineDecoder(limit)
    decoder.feed(data)
    decoder.end()
    return [message.body for message in iter(decoder.next, None)]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"{}", [b"{}"]),
        (b"{}\n[]\n", [b"{}", b"[]"]),
        (b"{}\r\n[]\r\n", [b"{}\r", b"[]\r"]),
        (b"\n\r\n \t\n{}\n\n", [b"{}"]),
    ],
    ids=["nothing", "no newline at the end", "lines", "with carriage returns", "blank lines"],
)
def test_lines(data: bytes, lines: list[bytes]) -> None:
    assert bodies(data) == lines


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1), max_size=6))
def test_round_trip(values: list[dict[str, str]]) -> None:
    data = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    assert [json.loads(body) for body in bodies(data)] == values


def test_the_stream_goes_on_behind_a_line_that_is_too_long() -> None:
    decoder = LineDecoder(10)
    decoder.feed(b"x" * 11)
    with pytest.raises(FramingError, match=r"more than 10 B") as caught:
        decoder.next()
    assert (caught.value.reason, caught.value.fatal) == (Reason.TOO_LARGE, False)
    decoder.feed(b"yyy\n" + b"z" * 10 + b"\n")
    assert decoder.next() == Message(b"z" * 10)


def test_the_stream_goes_on_behind_a_byte_order_mark() -> None:
    decoder = LineDecoder(10)
    decoder.feed("\ufeff{}\n[]\n".encode())
    with pytest.raises(FramingError, match="byte order mark") as caught:
        decoder.next()
    assert not caught.value.fatal
    assert decoder.next() == Message(b"[]")


def test_encoder() -> None:
    encoder = LineEncoder()
    assert encoder.encode(Lost(3, 9, 7)) == b'{"type":"lost","first":3,"last":9,"count":7}\n'
    assert bodies(encoder.heartbeat + encoder.encode(Lost(1, 1, 1)) + encoder.heartbeat) == [
        b'{"type":"lost","first":1,"last":1,"count":1}'
    ]
    with pytest.raises(RefusedError, match="no place for binary outputs"):
        encoder.encode(Lost(1, 1, 1), [memoryview(b"abcd")])
