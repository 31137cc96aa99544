"""Framings by media type."""

from __future__ import annotations

import pytest

from agent.errors import Reason, RefusedError
from agent.http.framing.formats import decoder_of, encoder_of
from agent.http.framing.frames import FrameDecoder
from agent.http.framing.lines import LineDecoder
from agent.http.framing.multipart import PartDecoder, boundary_of
from agent.http.framing.records import Lost
from targets.errors import ContractError

FRAMES = "application/vnd.tightfit.frames"
LINES = "application/x-ndjson"


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (LINES, LineDecoder),
        ("Application/X-NDJSON; charset=utf-8", LineDecoder),
        (FRAMES, FrameDecoder),
        ("multipart/x-mixed-replace; boundary=frame", PartDecoder),
        ('multipart/mixed; boundary="a b"', PartDecoder),
    ],
)
def test_decoders(content_type: str, kind: type) -> None:
    decoder = decoder_of(content_type, 17)
    assert type(decoder) is kind
    assert decoder.limit == 17


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "text/event-stream", "multipart/form-data; boundary=a"]
)
def test_what_is_no_stream(content_type: str) -> None:
    with pytest.raises(RefusedError, match="available: application/x-ndjson, ") as caught:
        decoder_of(content_type, 17)
    assert caught.value.reason is Reason.UNSUPPORTED_ENCODING


def test_a_boundary_is_needed() -> None:
    with pytest.raises(ContractError, match="boundary"):
        decoder_of("multipart/mixed", 17)


@pytest.mark.parametrize(
    ("accept", "content_type", "media_type"),
    [
        ("", LINES, LINES),
        ("", FRAMES, FRAMES),
        ("*/*", FRAMES, FRAMES),
        ("", "multipart/mixed; boundary=a", LINES),
        ("text/event-stream", LINES, "text/event-stream"),
        ("text/html, Text/Event-Stream;q=0.9, */*", FRAMES, "text/event-stream"),
        ("text/html, */*;q=0.1", LINES, LINES),
    ],
)
def test_encoders(accept: str, content_type: str, media_type: str) -> None:
    assert encoder_of(accept, content_type, "e").media_type == media_type


def test_boundaries_are_not_to_be_guessed() -> None:
    kinds = [encoder_of("multipart/mixed", LINES, "e").media_type for _ in range(2)]
    assert len(set(map(boundary_of, kinds))) == 2


def test_the_epoch_is_in_the_ids_of_events() -> None:
    assert encoder_of("text/event-stream", LINES, "5f3a").encode(Lost(1, 2, 2)).startswith(b"id: 5f3a-2\n")


def test_nothing_that_is_accepted() -> None:
    with pytest.raises(RefusedError, match="Accept is 'text/html'"):
        encoder_of("text/html", LINES, "e")
