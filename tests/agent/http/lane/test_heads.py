"""What the fast lane takes for a plain head, aiohttp reads in the same way; all else is left to aiohttp."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.http.lane.heads import Head, Heads, Sign, parse

FIELDS = 64
LINE = b"POST /v2/models/add/infer HTTP/1.1\r\n"
PLAIN = LINE + b"Host: x\r\nContent-Length: 5\r\n\r\n"


def aiohttps(raw: bytes) -> RawRequestMessage | None:
    """The one message that aiohttp reads from a head and the five bytes behind it, if it does."""
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16, max_headers=FIELDS)
        messages, upgraded, tail = parser.feed_data(raw + b"01234")
    except Exception:  # noqa: BLE001 - whatever it refuses
        return None
    finally:
        loop.close()
    if upgraded or tail or len(messages) != 1:
        return None
    message: RawRequestMessage = messages[0][0]
    return message


def agree(raw: bytes, head: Head) -> None:
    message = aiohttps(raw)
    assert message is not None
    version = f"/versions/{head.version}" if head.version else ""
    assert (message.method, message.path) == ("POST", f"/v2/models/{head.model}{version}/infer")
    assert message.url.path == message.path
    assert (message.version.major, message.version.minor) == (1, 1)
    assert int(message.headers["Content-Length"]) == head.length
    assert message.should_close == head.close
    assert (message.chunked, message.upgrade, message.compression) == (False, False, None)
    assert head.header_length == message.headers.get("Inference-Header-Content-Length")
    assert head.accept_encoding == message.headers.get("Accept-Encoding")


TOKENS = st.text("!#$%&'*+-.^_`|~09AZaz", min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12)


@settings(max_examples=300)
@given(
    fields=st.dictionaries(TOKENS.filter(lambda name: name.lower() not in {"te", "host"}), VALUES, max_size=5),
    known=st.sets(
        st.sampled_from(
            ["Accept-Encoding: gzip", "Connection: close", "Connection:  Keep-Alive ", "Priority: u=1",
             "X-Request-Id: a", "Inference-Header-Content-Length: 3", "Request-Timeout-Ms:7",
             "content-type: application/json; charset=utf-8"]
        )
    ),
    version=st.sampled_from(["", "/versions/3fa9"]),
)  # fmt: skip
def test_plain_heads_are_read_as_aiohttp_reads_them(fields: dict[str, str], known: set[str], version: str) -> None:
    lines = [f"POST /v2/models/a.b_c-D{version}/infer HTTP/1.1", "HOST: x", "Content-length:\t5"]
    lines += [*sorted(known), *(f"{name}: {value}" for name, value in fields.items())]
    raw = "\r\n".join([*lines, "", ""]).encode()
    names = [line.partition(":")[0].lower() for line in lines[1:]]
    head = parse(raw, FIELDS)
    if len(set(names)) == len(names):
        assert head is not None
        agree(raw, head)
    else:
        assert head is None


@settings(max_examples=500)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3),
    more=st.sampled_from([b"", b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n", b"X: y\r\n z\r\n"]),
)
def test_whatever_is_done_to_a_head(cuts: list[tuple[int, int, bytes]], more: bytes) -> None:
    raw = LINE + b"Host: x\r\nContent-Length: 5\r\n" + more + b"\r\n"
    for at, length, new in cuts:
        raw = raw[:at] + new + raw[at + length :]
    head = Heads(8190, FIELDS).read(raw)
    if isinstance(head, Head) and head.length == 5 and head.raw == raw:
        agree(raw, head)


@pytest.mark.parametrize(
    "raw",
    [
        PLAIN.replace(b"POST", b"post"), PLAIN.replace(b"POST", b"PUT"), PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"/infer", b"/infer?x=1"), PLAIN.replace(b"/add/", b"/%61dd/"), PLAIN.replace(b"/add/", b"/../"),
        PLAIN.replace(b"/v2", b"http://x/v2"), PLAIN.replace(b"/add/", b"/add//"), b"\r\n" + PLAIN,
        PLAIN.replace(b" HTTP", b"  HTTP"), PLAIN.replace(b"Host: x\r\n", b""), PLAIN.replace(b"Host: x", b"Host:"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nHost: x"), PLAIN.replace(b": 5", b": +5"),
        PLAIN.replace(b": 5", b": 05"),
        PLAIN.replace(b": 5", b": 5, 5"), PLAIN.replace(b": 5", b": 0x5"), PLAIN.replace(b": 5", b": 5 5"),
        PLAIN.replace(b"Content-Length: 5", b"X: 5"), PLAIN.replace(b"Content-Length:", b"Content-Length :"),
        PLAIN.replace(b": 5", b": 5\r\nContent-Length: 5"), PLAIN.replace(b"Host: x", b"Host: x\r\n y"),
        PLAIN.replace(b"Host: x", b"Host: x\rX: y"), PLAIN.replace(b"Host: x", b"Host: x\nX: y"),
        PLAIN.replace(b"Host: x", b"Host: \x00"), PLAIN.replace(b"Host: x", b"Host: \xff"),
        PLAIN.replace(b"Host: x", b"Host: x\r\nX Y: z"),
        *(
            PLAIN.replace(b"Host: x", b"Host: x\r\n" + field)
            for field in (
                b"Transfer-Encoding: chunked", b"transfer-encoding: identity", b"Expect: 100-continue",
                b"Upgrade: h2c", b"Connection: upgrade", b"Connection: close, te", b"Content-Encoding: gzip",
                b"TE: trailers", b"Trailer: X", b"Content-Type: image/jpeg", b"Content-Type: multipart/form-data",
                b"Request-Timeout-Ms: soon",
            )
        ),
        LINE + b"Host: x\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(FIELDS)) + b"Content-Length: 5\r\n\r\n",
    ],
)  # fmt: skip
def test_odd_heads(raw: bytes) -> None:
    assert Heads(8190, FIELDS).read(raw) is Sign.ODD


def test_a_head_that_is_not_there_yet() -> None:
    heads = Heads(8190, FIELDS)
    for end in range(1, len(PLAIN)):
        assert heads.read(PLAIN[:end]) is Sign.MORE
    assert heads.read(b"GET") is Sign.ODD
    assert heads.read(LINE + b"X: " + b"y" * 8190) is Sign.ODD


def test_equal_heads_are_read_once_and_ids_are_not_remembered() -> None:
    heads = Heads(8190, FIELDS)
    assert heads.read(PLAIN + b"01234") is heads.read(PLAIN)
    named = PLAIN.replace(b"Host: x", b"Host: x\r\nX-Request-Id: 7")
    first = heads.read(named)
    assert isinstance(first, Head)
    assert first.echo == {"X-Request-Id": "7"}
    assert heads.read(named) is not first
    for number in range(2000):
        heads.read(PLAIN.replace(b"Host: x", b"Host: x%d" % number))
    assert heads.read(PLAIN) == parse(PLAIN, FIELDS)


@pytest.mark.parametrize(
    "data", [b"POST /v2/models/add/infer HTTP/1.1\n", b"POST /v2/models/add/infer HTTP/1.1\r\nHost: x\n\n"]
)
def test_a_line_that_ends_with_lf_alone_is_not_waited_for(data: bytes) -> None:
    assert Heads(8190, 64).read(data) is Sign.ODD
