"""Urgency and deadline in a request's head."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from agent.errors import Reason, RefusedError
from agent.http.hints import TIMEOUT, dictionary, priority_of, timeout_of


def head(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    ("text", "priority"),
    [
        ("u=0", 32), ("u=3", 128), ("u=6", 224), ("u=7", 255), ("u=001", 64), ("u=-0", 32),
        ("u=1, i", 64), ("i, u=1", 64), ("u=1;why=2", 64),
        (' u=2 ', 96), ("u=2\t,\ti=?0", 96), ('a="x,\\"y", u=2', 96), ("a=(1 2;b);c, u=2", 96), ("a=:YQ==:,u=2", 96),
        ("u=1, u=5", 192), ("x=1.25, y=-3, z=tok/en, u=4", 160),
        # Out of range, of another type, or not there: as if nothing had been said.
        ("", 0), ("i", 0), ("u=8", 0), ("u=-1", 0), ("u=1.5", 0), ('u="1"', 0), ("u", 0), ("u=?1", 0), ("u=(1)", 0),
        # Not a dictionary: none of it counts.
        ("u=1,", 0), (",u=1", 0), ("u=1 i", 0), ("U=1", 0), ("u= 1", 0), ("u =1", 0), ("u=1, =", 0), ("u=1, a=(", 0),
        ('u=1, a="', 0), ("u=1, a=é", 0), ("u=1;", 0), ("u=\u0661", 0),
    ],
)  # fmt: skip
def test_priorities(text: str, priority: int) -> None:
    assert priority_of(head(("Priority", text))) == priority


def test_priorities_that_come_apart() -> None:
    assert priority_of(head(("priority", "i"), ("Priority", "u=0"))) == 32
    assert priority_of(head()) == 0


KEYS = st.text(string.ascii_lowercase, min_size=1, max_size=5)


@given(st.dictionaries(KEYS, st.integers(-999_999, 999_999), max_size=6), st.sampled_from([",", ", ", " \t,  "]))
def test_a_dictionary_is_read_as_it_was_written(members: dict[str, int], comma: str) -> None:
    text = comma.join(f"{key}={value}" for key, value in members.items())
    assert dictionary(text) == {key: str(value) for key, value in members.items()}


@given(st.text(st.sampled_from('au=*,;()":?01 \\.-'), max_size=200))
def test_whatever_is_sent_gives_a_priority(text: str) -> None:
    assert priority_of(head(("Priority", text))) in {0, *range(32, 255, 32), 255}


def test_a_long_head_takes_no_time() -> None:
    for text in ("u=(" + "1 " * 4000, 'u="' + "\\\\" * 4000, "a;" * 4000, "a=" + ":" * 8000, "(" * 8000):
        assert priority_of(head(("Priority", text))) == 0


def test_timeouts() -> None:
    assert timeout_of(head()) is None
    assert timeout_of(head((TIMEOUT, "250"))) == 0.25
    assert timeout_of(head((TIMEOUT.lower(), "1"))) == 0.001


@pytest.mark.parametrize("text", ["", "0", "-1", "+1", "1.5", "1e3", " 1", "1_0", "\u0661", "9" * 20, "soon"])
def test_timeouts_that_are_none(text: str) -> None:
    with pytest.raises(RefusedError, match=TIMEOUT) as error:
        timeout_of(head((TIMEOUT, text)))
    assert error.value.reason is Reason.BAD_REQUEST
