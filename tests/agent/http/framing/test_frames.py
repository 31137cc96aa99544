"""Frames of JSON and raw tensors: docs/streams.md, its program in C and the code agree on every byte."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.http.codecs import OutputTensor
from agent.http.framing.decoder import FramingError, Message
from agent.http.framing.frames import FrameDecoder, FrameEncoder, frame_head
from agent.http.framing.records import Lost, Timing, answer
from targets.tensor import DType
from tests.support.bundles import dense

DOCS = Path(__file__).parents[4] / "docs"
ROOM = 1000


class Vector(NamedTuple):
    """Bytes as the documentation has them, and what it says of them: nothing, or why they are no frame."""

    kind: str
    data: bytes


def read_vectors() -> list[Vector]:
    blocks = re.findall(r"```frame([a-z ]*)\n(.*?)```", (DOCS / "streams.md").read_text(), re.DOTALL)
    return [
        Vector(
            kind.strip(),
            b"".join(
                token[1:-1].encode() if token[0] == "'" else bytes.fromhex(token)
                for token in re.findall(r"'[^']*'|\S+", text)
            ),
        )
        for kind, text in blocks
    ]


VECTORS = read_vectors()
REQUEST, RESULT, LOST = (vector.data for vector in VECTORS if not vector.kind)
NO_FRAMES = [vector for vector in VECTORS if vector.kind]
GOOD = b"\x06\0\0\0\x02\0\0\0{}"


def messages(data: bytes, limit: int = ROOM) -> list[Message]:
    decoder = FrameDecoder(limit)
    decoder.feed(data)
    decoder.end()
    return list(iter(decoder.next, None))


def json_of(message: Message) -> tuple[bytes, bytes]:
    cut = int(message.header_length or 0)
    return message.body[:cut], message.body[cut:]


def test_a_request_as_documented() -> None:
    (message,) = messages(REQUEST)
    text, tensors = json_of(message)
    assert json.loads(text)["inputs"][0]["name"] == "x"
    assert struct.unpack("<2f", tensors) == (1.0, -2.0)
    assert frame_head(text, len(tensors)) + tensors == REQUEST


def test_records_as_documented() -> None:
    y = OutputTensor(dense("y", DType.FLOAT32, 1, 1), (1, 1), np.frombuffer(struct.pack("<f", 0.5), np.uint8), True)
    record, raw = answer(7, None, "m", "1", [y], Timing(40, 910, 1003))
    encoder = FrameEncoder()
    assert encoder.encode(record, raw) + b"".join(raw) == RESULT
    assert encoder.heartbeat + encoder.encode(Lost(3, 9, 7)) + encoder.heartbeat == LOST
    assert len(messages(LOST + RESULT + LOST)) == 3


@pytest.mark.parametrize("vector", NO_FRAMES, ids=[f"{v.kind} {v.data.hex(' ')}" for v in NO_FRAMES])
def test_no_frames_as_documented(vector: Vector) -> None:
    decoder = FrameDecoder(ROOM)
    decoder.feed(GOOD + vector.data)
    assert decoder.next() == Message(b"{}", "2", "application/octet-stream")
    with pytest.raises(FramingError) as caught:
        decoder.next()
    assert caught.value.fatal == (vector.kind == "broken")
    assert caught.value.reason is (Reason.TOO_LARGE if vector.kind == "too large" else Reason.BAD_REQUEST)
    decoder.feed((bytes(1005) if vector.kind == "too large" else b"") + GOOD)
    assert decoder.next() == (None if vector.kind == "broken" else Message(b"{}", "2", "application/octet-stream"))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.binary(max_size=50)), max_size=6))
def test_round_trip(records: list[tuple[bytes, bytes]]) -> None:
    data = b"".join(frame_head(text, len(tensors)) + tensors for text, tensors in records)
    assert [json_of(message) for message in messages(data)] == records


@pytest.mark.parametrize("cut", [1, 4, 7, 9])
def test_a_stream_that_ends_within_a_frame(cut: int) -> None:
    with pytest.raises(FramingError, match="ended within a frame") as caught:
        messages(GOOD[:cut])
    assert caught.value.fatal


def test_what_is_longer_than_any_frame_is_not_written() -> None:
    with pytest.raises(ValueError, match="must be fewer than 1073741824"):
        frame_head(b"{}", 1 << 30)


# --- the program in C


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs/examples/frames.c, compiled as strictly as the compiler can, with its faults made fatal."""
    path = tmp_path_factory.mktemp("frames") / "frames"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    checked = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *strict, *checked, "-o", path, DOCS / "examples" / "frames.c"], check=True)
    return path


def in_c(program: Path, *arguments: str, data: bytes = b"") -> bytes:
    return subprocess.run([program, *arguments], input=data, capture_output=True, check=True).stdout


def in_python(data: bytes) -> bytes:
    """What the program prints of these bytes."""
    decoder, found = FrameDecoder(ROOM), []
    decoder.feed(data)
    while True:
        try:
            message = decoder.next()
        except FramingError as error:
            kind = "broken" if error.fatal else "too large" if error.reason is Reason.TOO_LARGE else "invalid"
            found.append(kind.encode())
            continue
        if message is None:
            break
        text, tensors = json_of(message)
        found.append(b"frame %b %b" % (text, tensors.hex().encode()))
    return b"".join(line + b"\n" for line in found)


def test_the_request_of_the_program_is_the_documented_one(program: Path) -> None:
    assert in_c(program, "request") == REQUEST


@pytest.mark.parametrize("piece", ["1", "7", "4096"])
def test_the_program_reads_what_the_agent_does(program: Path, piece: str) -> None:
    data = b"".join(vector.data + bytes(1005) * (vector.kind == "too large") + GOOD for vector in VECTORS)
    printed = in_c(program, "read", piece, str(ROOM), data=data)
    assert printed.count(b"heartbeat\n") == 2
    assert printed.replace(b"heartbeat\n", b"") == in_python(data)
    assert printed.endswith(b"broken\n")
