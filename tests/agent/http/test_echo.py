"""Which ids come back, and which are ignored."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from agent.http.echo import echoed

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_both_come_back_whatever_their_case() -> None:
    headers = CIMultiDict({"x-request-ID": 'a1/b?c="d"', "Traceparent": TRACE, "Host": "x"})
    assert echoed(headers) == {"X-Request-Id": 'a1/b?c="d"', "traceparent": TRACE}
    assert echoed(CIMultiDict()) == {}


@pytest.mark.parametrize("id_", ["", " ", "a b", "a\tb", "é", "a\r\nSet-Cookie: b", "a\n", "\x00", "x" * 129])
def test_ids_that_are_ignored(id_: str) -> None:
    assert echoed(CIMultiDict({"X-Request-Id": id_})) == {}
    assert echoed(CIMultiDict({"X-Request-Id": "x" * 128})) == {"X-Request-Id": "x" * 128}


@pytest.mark.parametrize("trace", [TRACE, f"cc{TRACE[2:]}", f"cc{TRACE[2:]}-what.comes.later", f"01{TRACE[2:]}-"])
def test_traces(trace: str) -> None:
    assert echoed(CIMultiDict({"traceparent": trace})) == {"traceparent": trace}


@pytest.mark.parametrize(
    "trace",
    [
        "", TRACE.upper(), f"{TRACE}-more", f"{TRACE}-", f"{TRACE}\n", f"ff{TRACE[2:]}", TRACE[:-1], f"{TRACE}0",
        f"00-{'0' * 32}{TRACE[35:]}", f"{TRACE[:36]}{'0' * 16}-01", f"cc{TRACE[2:]}x", f"cc{TRACE[2:]}-é",
        f"cc{TRACE[2:]}-{'x' * 100}", TRACE.replace("-", "_"),
    ],
)  # fmt: skip
def test_traces_that_are_ignored(trace: str) -> None:
    assert echoed(CIMultiDict({"traceparent": trace})) == {}
