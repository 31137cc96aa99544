"""All decoders: any split gives the same, only FramingError is raised, and what is held is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.http.framing.decoder import Decoder, FramingError, Message
from agent.http.framing.frames import FrameDecoder, frame_head
from agent.http.framing.lines import LineDecoder
from agent.http.framing.multipart import PartDecoder

LIMIT = 64
# What a decoder may hold beside a record: of multipart, the headers of a part.
SLACK = 5000

Make = Callable[[], Decoder]
MAKERS: dict[str, Make] = {
    "lines": lambda: LineDecoder(LIMIT),
    "frames": lambda: FrameDecoder(LIMIT),
    "parts": lambda: PartDecoder(LIMIT, "b"),
}
# Of these hypothesis makes streams that are nearly right.
PIECES: dict[str, list[bytes]] = {
    "lines": [b'{"a":1}', b"\n", b"\r\n", b"\r", b" ", b"\xef\xbb\xbf", b"x" * LIMIT, b"y" * 40],
    "frames": [
        frame_head(b"{}", 3) + b"abc", frame_head(b"{}"), frame_head(b"j" * LIMIT), frame_head(b"j", LIMIT),
        bytes(4), b"\x02\0\0\0zz", b"\x08\0\0\0\x05\0\0\0abcd", b"\x08\0\0\0\0\0\0\0abcd", b"\0", b"xy",
    ],
    "parts": [
        b"\r\n--b", b"--b", b"\r\n", b"--", b"-", b"\r", b"\r\n--b\r\n", b"\r\n--b--", b"\r\n--bb", b"\r\n--b \t\r\n",
        b"Content-Type: image/jpeg\r\n", b"Content-Length: 4\r\n", b"Content-Length: 70\r\n", b"Content-Length: x\r\n",
        b"bad header\r\n", b"\r\n\r\n", b"\xff\xd8\xff", b"abcd", b"x" * LIMIT, b"y: " + b"z" * 4200,
        b"\r\n--b\r\nContent-Length: 4\r\n\r\nabcd\r\n--b", b"\r\n--b\r\n\r\nabcd\r\n--b",
    ],
}  # fmt: skip


def outcomes(decoder: Decoder, chunks: Iterable[bytes]) -> list[Message | tuple[str, bool]]:
    """What a stream in these pieces gives; an error is its text, and whether it was fatal."""
    found: list[Message | tuple[str, bool]] = []

    def drain() -> None:
        while True:
            try:
                message = decoder.next()
            except FramingError as error:
                found.append((str(error), error.fatal))
                continue
            if message is None:
                break
            found.append(message)
        assert decoder.held <= LIMIT + SLACK

    for chunk in chunks:
        decoder.feed(chunk)
        drain()
    decoder.end()
    drain()
    return found


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(at)]


@pytest.mark.parametrize("kind", MAKERS)
@given(st.data())
def test_any_split_gives_the_same(kind: str, data: st.DataObject) -> None:
    pieces = st.one_of(st.sampled_from(PIECES[kind]), st.binary(max_size=8))
    stream = b"".join(data.draw(st.lists(pieces, max_size=24)))
    if kind == "parts" and data.draw(st.booleans()):
        stream = b"--b\r\n" + stream
    whole = outcomes(MAKERS[kind](), [stream])
    assert outcomes(MAKERS[kind](), [stream[i : i + 1] for i in range(len(stream))]) == whole
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert outcomes(MAKERS[kind](), split(stream, cuts)) == whole
    assert all(0 < len(found.body) <= LIMIT for found in whole if isinstance(found, Message))


@pytest.mark.parametrize("kind", MAKERS)
@given(st.lists(st.binary(max_size=300), max_size=30))
def test_noise(kind: str, chunks: list[bytes]) -> None:
    outcomes(MAKERS[kind](), chunks)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_never_ends_is_not_kept(kind: str) -> None:
    opening = {"lines": b"", "frames": (1 << 29).to_bytes(4, "little"), "parts": b"--b\r\n\r\n"}[kind]
    decoder = MAKERS[kind]()
    found = outcomes(decoder, [opening, *[b"x" * 10_000] * 100])
    assert [text for text, _ in found] == [  # type: ignore[misc]
        f"a {kind.rstrip('s')} has more than 64 B (this stream takes no larger ones)"
    ]


def test_what_was_fatal_stays() -> None:
    decoder = FrameDecoder(LIMIT)
    decoder.feed(b'{"inputs": []}\n')
    with pytest.raises(FramingError, match="must be fewer than"):
        decoder.next()
    decoder.feed(frame_head(b"{}"))
    assert decoder.failed
    assert decoder.next() is None
    assert decoder.held == 0


@pytest.mark.parametrize(
    ("name", "record", "good"),
    [
        ("lines", b"x" * 60 + b"\n", b"{}\n"),
        ("frames", frame_head(b"j" * 60), frame_head(b"{}")),
        ("parts", b"--b\r\nContent-Length: 60\r\n\r\n" + b"x" * 60, b"\r\n--b\r\nContent-Length: 2\r\n\r\n{}"),
        ("parts", b"--b\r\n\r\n" + b"x" * 60, b"\r\n--b\r\nContent-Length: 2\r\n\r\n{}"),
    ],
    ids=["lines", "frames", "parts with their length", "parts without"],
)
@pytest.mark.parametrize("left", [1, 20])
def test_a_record_that_is_left_out(name: str, record: bytes, good: bytes, left: int) -> None:
    decoder = MAKERS[name]()
    decoder.feed(record[:-left])
    assert decoder.next() is None
    assert decoder.begun
    decoder.skip()
    decoder.feed(record[-left:] + good)
    message = decoder.next()
    assert message is not None
    assert message.body == b"{}"
    decoder.end()
    assert decoder.next() is None
