"""What is kept comes back as it was."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.message import Kind, Message, pack, unpack
from agent.mqtt.moment import Moment, Quality

MOMENTS = st.builds(
    Moment, st.integers(0, 2**62), st.uuids().map(str), st.integers(-(2**62), 2**62), st.sampled_from(Quality)
)
TEXT = st.text(max_size=20)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=20)
)
BODIES = st.dictionaries(
    TEXT,
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)),
    max_size=5,
)
NAMES = st.text(st.characters(exclude_categories=()), max_size=20)
MESSAGES = st.builds(
    Message, NAMES, st.sampled_from(Kind), NAMES, BODIES, MOMENTS, st.just("result/1"), st.booleans(),
    st.none() | st.integers(0, 2**32 - 1), st.none() | TEXT, st.none() | TEXT, st.none() | st.binary(max_size=9),
)  # fmt: skip


@given(MESSAGES)
def test_what_is_packed_comes_back(message: Message) -> None:
    assert unpack(pack(message)) == message


def test_text_that_is_no_text_is_kept_as_far_as_it_is() -> None:
    moment = Moment(1, "boot", 2, Quality.NTP)
    kept = unpack(pack(Message("\ud800", Kind.EVENT, "n", {"a\ud800": ["b\udfffc", 1]}, moment, "event/1")))
    assert (kept.component, kept.body) == ("\ud800", {"a?": ["b?c", 1]})


def test_nan_is_kept() -> None:
    moment = Moment(1, "boot", 2, Quality.NTP)
    kept = unpack(pack(Message("c", Kind.MEASURE, "n", {"x": math.nan}, moment, "figures/1")))
    assert math.isnan(kept.body["x"])  # type: ignore[arg-type]


@given(st.binary(max_size=100))
def test_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        unpack(data)
