"""Names of any kind become levels that may be sent, and come back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.mqtt import topics
from agent.mqtt.message import Kind
from agent.mqtt.packet import is_topic

# Half surrogate pairs too.
ANY = st.text(st.characters(exclude_categories=()), max_size=300)


@given(ANY)
@example("a+/b#")
@example("\ud800")
@example("a\0b")
@example("")
@example("%")
@example("%~")
@example("x" * 100_000)
def test_a_level_may_be_sent_and_gives_its_name_back(name: str) -> None:
    level = topics.escape(name)
    assert 0 < len(level) <= topics.LEVEL_BYTES
    assert level.isascii()
    assert level.isprintable()
    assert not set(level) & set("+#/ $")
    if "%~" in level:
        with pytest.raises(ValueError, match="was cut"):
            topics.unescape(level)
    else:
        assert topics.unescape(level) == name


@given(ANY, ANY)
def test_two_names_never_have_one_level(one: str, other: str) -> None:
    assert (topics.escape(one) == topics.escape(other)) == (one == other)


def test_long_names_differ_in_what_was_cut() -> None:
    assert topics.escape("é" * 500 + "a") != topics.escape("é" * 500 + "b")


def test_what_short_names_are_is_not_cut() -> None:
    assert topics.unescape(topics.escape("é" * 32)) == "é" * 32
    assert topics.escape("text-detect.v1") == "text-detect.v1"


@given(*[st.text(st.characters(exclude_categories=()), max_size=20)] * 3, st.sampled_from(Kind))
def test_a_topic_says_what_it_was_made_of(device: str, component: str, name: str, kind: Kind) -> None:
    made = topics.topic("fleet/edge", device, topics.stream(component, kind, name))
    assert is_topic(made)
    assert topics.parse("fleet/edge", made) == (device, component, kind, name)


@pytest.mark.parametrize(
    "text",
    [
        "edge/v1/d/c/m",
        "edge/v2/d/c/m/n",
        "edge/v1/d/c/x/n",
        "edge/v1/d/c/m/n/o",
        "edge/v1/d/ä/m/n",
        "",
        "edge/v1/d//m/n",
    ],
)
def test_other_topics_are_none_of_ours(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|Kind"):
        topics.parse("edge", text)


@pytest.mark.parametrize("text", ["", "a+", "#", "a\0", "\ud800", "x" * 65536])
def test_not_everything_is_a_topic(text: str) -> None:
    assert not is_topic(text)
