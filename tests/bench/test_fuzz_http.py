"""Wrong requests hurt nobody: a short form of bench/results/fuzz_http.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop

from bench.fuzz_http import MalformedError, Reply, answers_in, exchange, fuzz, fuzzed, judge_of, pieces_of
from bench.http_cases import CHAIN, GRAMMAR, MODELS, RAW, Case, case_of, good, smuggled


def test_some_thousands_of_wrong_requests(tmp_path: Path) -> None:
    with fuzzed(tmp_path) as agent:
        made, wrong, _ = uvloop.run(fuzz(agent, 1, 4000, lambda _: None))
        assert agent.stop() == 0
    assert wrong == []
    assert [str(finding) for finding in made.findings] == []
    assert made.sent == 2000
    assert made.kinds.keys() == {*RAW, *GRAMMAR}
    # Of the grammar's some are right, and most are not.
    answered = {status for kind, status in made.statuses if kind in GRAMMAR}
    assert {"200", "400", "404", "413", "415"} <= answered


def test_a_case_is_known_by_its_number() -> None:
    cases = [case_of(3, number) for number in range(600)]
    assert cases == [case_of(3, number) for number in range(600)]
    assert cases != [case_of(4, number) for number in range(600)]
    assert {case.framed for case in cases[: 3 * CHAIN]} == {True, False}


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    """The judge, with replies that an agent must not give."""
    with fuzzed(tmp_path) as agent:
        assert {agent.request(f"/v2/models/{name}")[0] for name in MODELS} == {200}
        judge = uvloop.run(judge_of(agent.port))
        cases = (Case(1, "one", smuggled(), framed=True), Case(2, "two", good(9), framed=True))
        right = uvloop.run(exchange(agent.port, pieces_of(cases, b""), 1.0))
    assert judge.told(cases, right, begins_with_first=False).wrong == (
        "case 1 (one): a request within it was answered",
    )
    cases = (Case(1, "one", good(8), framed=True), cases[1])
    ours = right.data.replace(b'"id":"smuggled"', b'"id":"answered"')
    one, two = ours.find(b"HTTP/1.1", 1), ours.rfind(b"HTTP/1.1")
    assert judge.told(cases, Reply(ours, True, True), begins_with_first=False).wrong == ()
    for data, wrong in (
        (ours.replace(b"200 OK", b"500 Internal Server Error", 1), "500"),
        (ours.replace(b"[1001.0]", b"[1002.0]"), "0 answers"),
        (ours[:one] + ours, "2 answers"),
        (ours[one:], "0 answers"),
        (ours[:two], "what follows it was not"),
        (ours[:-1], "cut off"),
        (b"HTTP/2.0" + ours[8:], "no answer"),
    ):
        told = judge.told(cases, Reply(data, True, True), begins_with_first=False)
        assert any(wrong in each for each in told.wrong), (wrong, told.wrong)
    assert judge.told(cases, Reply(ours, False, False), begins_with_first=False).wrong == ("not closed behind a FIN",)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(MalformedError):
        answers_in(data)
