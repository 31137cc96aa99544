"""An edge node, held against the assertions of the Sparkplug specification that are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.sparkplug import BDSEQ, REBIRTH, Metric, Node, Value, is_rebirth
from tests.support.sparkplug import command, read, values

METRICS = {
    "a": Metric(1, int), "b": Metric(2.5, float), "c": Metric(True, bool), "d": Metric("\u00e4", str),
    "e": Metric(None, float), "f": Metric(-3, int),
}  # fmt: skip


def test_topics_and_how_they_are_sent() -> None:
    """tck-id-topic-structure-namespace-a, -payloads-nbirth-qos, -ndata-qos, -ndeath-will-message-qos, -retain."""
    node = Node("plant", "car-1")
    will, birth = node.connects(), node.birth(METRICS, 7)
    data = node.data({**METRICS, "a": Metric(2, int)}, 8)
    assert data is not None
    assert [(each.topic, each.qos, each.retain) for each in (will, birth, data)] == [
        ("spBv1.0/plant/NDEATH/car-1", 1, False),
        ("spBv1.0/plant/NBIRTH/car-1", 0, False),
        ("spBv1.0/plant/NDATA/car-1", 0, False),
    ]
    assert node.commands == "spBv1.0/plant/NCMD/car-1"


def test_a_birth_says_all() -> None:
    """tck-id-payloads-nbirth-timestamp, -seq, -bdseq, -rebirth-required; -name-requirement, -metric-datatype."""
    node = Node("plant", "car-1")
    node.connects()
    birth = read(node.birth(METRICS, 1_700_000_000_123).payload)
    assert (birth.timestamp, birth.seq, birth.HasField("seq")) == (1_700_000_000_123, 0, True)
    assert values(birth) == {
        BDSEQ: 0, REBIRTH: False, "a": 1, "b": 2.5, "c": True, "d": "\u00e4", "e": None, "f": (1 << 64) - 3,
    }  # fmt: skip
    assert {metric.name: metric.datatype for metric in birth.metrics} == {
        BDSEQ: 4, REBIRTH: 11, "a": 4, "b": 10, "c": 11, "d": 12, "e": 10, "f": 4,
    }  # fmt: skip
    assert all(metric.HasField("timestamp") for metric in birth.metrics)


def test_a_death_names_its_birth_and_has_no_number() -> None:
    """tck-id-payloads-ndeath-seq, -bdseq; -topics-nbirth-bdseq-matching, -increment."""
    node = Node("plant", "car-1")
    for bdseq in [*range(256), 0, 1]:
        will = read(node.connects().payload)
        assert not will.HasField("seq")
        assert values(will) == {BDSEQ: bdseq}
        assert values(read(node.birth({}, 1).payload))[BDSEQ] == bdseq
        assert values(read(node.death().payload)) == {BDSEQ: bdseq}


def test_data_is_numbered_and_only_of_what_changed() -> None:
    """tck-id-payloads-ndata-seq, -seq-inc; -operational-behavior-data-publish-nbirth-change."""
    node = Node("plant", "car-1")
    node.connects()
    node.birth(METRICS, 1)
    assert node.data(METRICS, 2) is None
    for number in range(1, 600):
        data = node.data({**METRICS, "a": Metric(number + 1, int)}, 3)
        assert data is not None
        assert read(data.payload).seq == number % 256
        assert values(read(data.payload)) == {"a": number + 1}
    assert read(node.birth(METRICS, 4).payload).seq == 0


def test_what_was_not_in_the_birth_needs_another() -> None:
    """tck-id-operational-behavior-data-publish-nbirth."""
    node = Node("plant", "car-1")
    node.birth({"a": Metric(1, int)}, 1)
    assert not node.wants_birth({"a": Metric(2, int)})
    assert node.wants_birth(METRICS)
    assert node.wants_birth({})
    with pytest.raises(ValueError, match="not in the birth"):
        node.data(METRICS, 2)


def test_commands() -> None:
    """tck-id-operational-behavior-data-commands-rebirth-name, -value."""
    assert is_rebirth(command(REBIRTH, True))
    assert not is_rebirth(command(REBIRTH, False))
    assert not is_rebirth(command("Node Control/Reboot", True))
    assert not is_rebirth(b"")
    assert not is_rebirth(command(REBIRTH, True)[:-1])
    assert not is_rebirth(b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")


@given(st.binary(max_size=200))
def test_what_comes_may_be_anything(data: bytes) -> None:
    is_rebirth(data)


@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda name: name.isprintable()),
        st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.booleans(), st.text()),
        max_size=5,
    )
)
def test_all_values_come_as_they_were(found: dict[str, Value]) -> None:
    metrics = {f"x{name}": Metric(value, type(value)) for name, value in found.items()}  # type: ignore[arg-type]
    made = values(read(Node("g", "n").birth(metrics, 1).payload))
    for name, metric in metrics.items():
        wanted = metric.value
        if metric.kind is int:
            wanted = int(wanted or 0) % (1 << 64)
        assert made[name] == wanted
