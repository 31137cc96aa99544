"""Parts as cameras send them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.http.framing.decoder import FramingError, Message
from agent.http.framing.multipart import PartDecoder, PartEncoder, boundary_of
from agent.http.framing.records import Answer, Lost
from targets.errors import ContractError

JPEG = b"\xff\xd8\xff\xe0 an image \xff\xd9"


def part(body: bytes, *headers: str) -> bytes:
    return b"--frame\r\n" + "".join(f"{header}\r\n" for header in headers).encode() + b"\r\n" + body + b"\r\n"


def sized(body: bytes, *headers: str) -> bytes:
    return part(body, f"Content-Length: {len(body)}", *headers)


def decoder_for(data: bytes, limit: int = 100) -> PartDecoder:
    decoder = PartDecoder(limit, "frame")
    decoder.feed(data)
    return decoder


def bodies(data: bytes) -> list[bytes]:
    decoder = decoder_for(data)
    decoder.end()
    return [message.body for message in iter(decoder.next, None)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b"--frame--\r\n", []),
        (part(b"a") + part(b"b") + b"--frame--", [b"a", b"b"]),
        (b"preamble\r\n" + part(b"a") + b"--frame--\r\nepilogue --frame\r\n\r\nx", [b"a"]),
        (part(b"a --frame--") + b"--frame--", [b"a --frame--"]),
        (part(b"a\r\n--framed\r\nb") + b"--frame--", [b"a\r\n--framed\r\nb"]),
        (part(b"\r\n\r\n") + b"--frame--", [b"\r\n\r\n"]),
        (part(b"") + part(b"a") + b"--frame\r\nA: b\r\n\r\n--frame--", [b"a"]),
        (b"--frame \t \r\n\r\na\r\n--frame--", [b"a"]),
        (sized(JPEG) + sized(b"\r\n--frame--\r\n"), [JPEG, b"\r\n--frame--\r\n"]),
        (sized(JPEG) + sized(b"") + b"--frame\r\n", [JPEG]),
    ],
    ids=[
        "nothing", "no parts", "parts", "preamble and epilogue", "a delimiter without its line break",
        "only like the boundary", "line breaks", "heartbeats", "white space behind the delimiter",
        "lengths", "a delimiter sent ahead",
    ],
)  # fmt: skip
def test_parts(data: bytes, found: list[bytes]) -> None:
    assert bodies(data) == found


def test_a_part_of_known_length_does_not_wait_for_the_next() -> None:
    decoder = decoder_for(sized(JPEG)[:-2])
    assert decoder.next() == Message(JPEG, None, "")


def test_headers() -> None:
    decoder = decoder_for(
        sized(b"{}abc", "content-type:IMAGE/JPEG ; q=1", "CONTENT-ID: <left-17>", "Inference-Header-Content-Length: 2")
    )
    assert decoder.next() == Message(b"{}abc", "2", "image/jpeg", "left-17")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part(b"a", "no colon"), "header line b'no colon'"),
        (part(b"a", "A: b", " folded"), "header line b' folded'"),
        (part(b"a", "A : b"), "header line"),
        (part(b"a", "A: \x00"), "header line"),
        (part(b"a", "Content-Length: +1"), r"Content-Length '\+1'"),
        (part(b"a", "Content-Length: 1", "Content-Length: 2"), "two headers 'content-length' that differ"),
        (part(b"a", "Content-Transfer-Encoding: base64"), "Content-Transfer-Encoding 'base64'"),
        (part(b"a", "A: " + "b" * 5000), "headers of more than 4096 bytes"),
        (part(b"a" * 101), "more than 100 B"),
        (part(b"a" * 101, "Content-Length: 101"), "more than 100 B"),
        (part(b"a", "Content-Length: 101"), "more than 100 B"),
        (b"--frame\r\nA: b\r\n", "header line b'--frame'"),
    ],
)
def test_the_stream_goes_on_behind_a_bad_part(bad: bytes, message: str) -> None:
    decoder = decoder_for(bad + sized(b"good"))
    with pytest.raises(FramingError, match=message) as caught:
        decoder.next()
    assert not caught.value.fatal
    assert caught.value.reason is (Reason.TOO_LARGE if "more than 100 B" in message else Reason.BAD_REQUEST)
    found = decoder.next()
    assert found is not None
    assert found.body == b"good"


def test_what_a_header_costs_does_not_grow_with_its_white_space() -> None:
    decoder = decoder_for(part(b"a", "A:" + " " * 4000 + "\0") + part(b"a", "A:" + " b" * 2000) + b"--frame--")
    with pytest.raises(FramingError, match="header line"):
        decoder.next()
    assert decoder.next() == Message(b"a", None, "")


def test_a_length_that_is_too_short() -> None:
    decoder = decoder_for(part(b"abcdef", "Content-Length: 3") + sized(b"good"))
    assert decoder.next() == Message(b"abc", None, "")
    with pytest.raises(FramingError, match="goes on behind its Content-Length"):
        decoder.next()
    assert decoder.next() == Message(b"good", None, "")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (part(b"a") + b"--frame\r\nA: b", "ended within a part"),
        (part(b"a") + part(b"b"), "ended within a part"),
        (part(b"a", "Content-Length: 4"), "ended within a part"),
        (b"--frame\r\nContent-Length: 4\r\n\r\n", "ended within a part"),
        (b"no delimiter", "no part begins"),
        (b"x" * 5000, "no part begins"),
        (b"x" * 5000 + b"\r\n" + part(b"a"), "no part begins"),
        (b"----frame\r\n\r\na\r\n", "parts begin with a line '--frame'"),
    ],
)
def test_nothing_follows_a_stream_that_is_cut_off_or_of_another_boundary(data: bytes, message: str) -> None:
    decoder = decoder_for(data)
    decoder.end()
    with pytest.raises(FramingError, match=message) as caught:
        list(iter(decoder.next, None))
    assert caught.value.fatal
    assert decoder.next() is None


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/x-mixed-replace; boundary=frame", "frame"),
        ('multipart/mixed; charset=utf-8; BOUNDARY="a b\'()+_,-./:=?"', "a b'()+_,-./:=?"),
        ('multipart/mixed;boundary="a\\-b"', "a-b"),
        ("multipart/mixed;boundary=" + "x" * 70, "x" * 70),
    ],
)
def test_boundaries(content_type: str, boundary: str) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    ["multipart/mixed", "multipart/mixed; boundary=", 'multipart/mixed; boundary="a "', "multipart/mixed; boundary=é",
     "multipart/mixed; boundary=" + "x" * 71, 'multipart/mixed; boundary="a\r\nb"'],
)  # fmt: skip
def test_what_is_no_boundary(content_type: str) -> None:
    with pytest.raises(ContractError, match="has no valid boundary"):
        boundary_of(content_type)


@pytest.mark.parametrize("write", [part, sized])
@given(st.lists(st.binary(min_size=1, max_size=60).filter(lambda body: b"\r\n--" not in b"\r\n" + body), max_size=5))
def test_round_trip(write: Callable[[bytes], bytes], records: list[bytes]) -> None:
    assert bodies(b"".join(write(record) for record in records) + b"--frame--") == records


def test_encoder() -> None:
    encoder = PartEncoder("multipart/mixed", "b1")
    raw = [memoryview(b"abcd"), memoryview(b"ef")]
    record = Answer(seq=1, status=200, model_name="m", model_version="1", outputs=[])
    stream = b"".join(
        [encoder.opening, encoder.heartbeat, encoder.encode(Lost(1, 2, 2)), encoder.encode(record, raw), *raw]
    )
    decoder = PartDecoder(1000, boundary_of(encoder.media_type))
    decoder.feed(stream + encoder.heartbeat + encoder.closing)
    decoder.end()
    lost, result = iter(decoder.next, None)
    assert lost == Message(b'{"type":"lost","first":1,"last":2,"count":2}')
    assert result.media_type == "application/octet-stream"
    assert result.header_length is not None
    cut = int(result.header_length)
    assert (json.loads(result.body[:cut])["seq"], result.body[cut:]) == (1, b"abcdef")
