"""BYTES in length-prefixed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.strings import pack_strings, unpack_strings
from targets.errors import ContractError


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_round_trip(items: list[bytes]) -> None:
    assert unpack_strings(memoryview(pack_strings(items)), len(items)) == items


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_elements_or_a_clear_error(data: bytes, count: int) -> None:
    try:
        items = unpack_strings(memoryview(data), count)
    except ContractError:
        return
    assert len(items) == count
    assert pack_strings(items) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x05\0\0\0ab", "element 0 has length 5, but 2 bytes are left"),
        (b"\xff\xff\xff\xff", "length 4294967295"),
        (b"\x01\0\0\0a\x01\0", "ends within a length prefix"),
        (b"\0\0\0\0", "has 1 elements, its shape needs 2"),
        (b"\0\0\0\0" * 3, "goes on after its 2 elements"),
    ],
)
def test_what_does_not_agree_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        unpack_strings(memoryview(data), 2)
