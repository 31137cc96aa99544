"""Requests to generate text, without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.generation.sampling import Sampling
from agent.http.generate import Wanted, parse
from targets.errors import ContractError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["text_input", "parameters", "temperature", "top_k", "top_p", "seed", "max_tokens", "stop"])


def test_all_of_it() -> None:
    body = {
        "text_input": "a",
        "parameters": {
            "temperature": 0,
            "top_k": 5,
            "top_p": 0.5,
            "seed": 1,
            "stop": "x",
            "timeout": 1500,
            "priority": 9,
        },
        "max_tokens": 7,
        "details": True,
    }
    assert parse(msgspec.json.encode(body)) == Wanted("a", Sampling(0, 5, 0.5, 1), 7, ("x",), 0.0015, 9, True)


def test_the_protocols_defaults() -> None:
    assert parse(b'{"text_input": "a", "top_k": null}') == Wanted("a", Sampling(), 20, (), None, 0, False)


@given(st.binary(max_size=60))
def test_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ContractError):
        parse(body)


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_whatever_it_says_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        wanted = parse(msgspec.json.encode(fields))
    except ContractError:
        return
    assert wanted.prompt == fields["text_input"]
    assert wanted.max_tokens >= 1
