"""Records come back as they went, and damage costs no more than what it hit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.spool.records import ENTRY, MAGIC, Damage, Reader, Record, pack

U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
BODIES = st.one_of(st.binary(max_size=300), st.just(MAGIC * 3), st.just(b"\0" * 70_000))
RECORDS = st.builds(Record, st.just(ENTRY), U64, U64, NAMES, NAMES, U64, U64, BODIES)


def read(data: bytes) -> list[Record | Damage]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return [found for _, found in Reader(file.fileno(), 0, os.fstat(file.fileno()).st_size)]


@given(st.lists(RECORDS, max_size=8))
def test_what_is_packed_is_read(records: Sequence[Record]) -> None:
    assert read(b"".join(map(pack, records))) == records


@given(st.lists(RECORDS, min_size=1, max_size=5), st.data())
def test_a_torn_tail_takes_the_last_record_alone(records: Sequence[Record], data: st.DataObject) -> None:
    packed = b"".join(map(pack, records))
    last = len(pack(records[-1]))
    cut = len(packed) - data.draw(st.integers(1, last))
    found = read(packed[:cut])
    assert [each for each in found if isinstance(each, Record)] == records[:-1]
    torn = [Damage(len(packed) - last, cut, torn=True)] if cut > len(packed) - last else []
    assert [each for each in found if isinstance(each, Damage)] == torn


@given(st.lists(RECORDS, min_size=1, max_size=5), st.data())
def test_a_bad_byte_costs_the_record_that_has_it(records: Sequence[Record], data: st.DataObject) -> None:
    packed = [bytearray(pack(record)) for record in records]
    which = data.draw(st.integers(0, len(packed) - 1))
    packed[which][data.draw(st.integers(0, len(packed[which]) - 1))] ^= data.draw(st.integers(1, 255))
    found = read(b"".join(packed))
    assert [each for each in found if isinstance(each, Record)] == [*records[:which], *records[which + 1 :]]
    assert [each.torn for each in found if isinstance(each, Damage)] == [which == len(records) - 1]


def test_a_length_that_lies_is_not_read() -> None:
    good = pack(Record(ENTRY, 1, 2, "s", "t", 3, 4, b"body"))
    for length in (0, 1, 2**31, 2**32 - 1):
        bad = good[:8] + length.to_bytes(4, "little") + good[12:]
        assert read(bad + good)[1:] == read(good)
