"""The soak of streams in short: real peers, good, slow and dead, against a real agent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from bench.soak import ENGINE, GATEWAY
from bench.stream_soak import NAME, Answers, Load, Records, Soak, bundle, settings, soak
from bench.streams import FRAMES, LINES
from tests.support.agents import serving

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = {"type": "result", "seq": 1, "outputs": [{"name": "y", "data": [7.0] * 64}]}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_answers_of_any_split() -> None:
    line = json.dumps(ANSWER).encode() + b"\n"
    whole = HEAD + chunk(b"\n" + line[:9]) + chunk(line[9:] + line) + b"0\r\n\r\n"
    answers, found = Answers(LINES), []
    for at in range(len(whole)):
        assert not answers.ended
        found += answers.feed(whole[at : at + 1])
    assert found == [(ANSWER, b"")] * 2
    assert answers.ended


def test_an_answer_is_held_against_its_own_record() -> None:
    assert Records(LINES).holds(7, ANSWER, b"")
    assert not Records(LINES).holds(8, ANSWER, b"")
    assert not Records(FRAMES).holds(7, ANSWER, bytes(4 * 64))


def test_a_refusal_is_no_answer() -> None:
    with pytest.raises(ValueError, match="503"):
        Answers(LINES).feed(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")


def test_nothing_is_missing_twice_or_left_behind(tmp_path: Path) -> None:
    """Whether memory grows shows only after longer."""
    load = Load(streams=6, slow=2, dead=2, rate=10.0)
    config = tmp_path / "agent.toml"
    config.write_text(settings(load.all), encoding="utf-8")
    with serving(bundle(tmp_path / f"{NAME}.tfb"), tmp_path / "log", "--config", str(config)) as agent:
        made = asyncio.run(soak(agent, load, 6.0, 2.0))
        assert agent.stop() == 0
        assert "Traceback" not in agent.log
    found = [each for each in made.faults() if "grew" not in each and "threads" not in each]
    assert found == []
    counts = made.seen.counts
    assert counts["healthy"] >= load.streams
    assert counts["slow"] > 0
    assert counts["dead"] >= load.dead
    assert made.seen.latency.count == counts["healthy"]
    assert f"{counts['healthy']:,} answers to healthy streams" in made.report(found, "")
    assert_a_gateway_that_took_too_much_is_found(made)


def assert_a_gateway_that_took_too_much_is_found(made: Soak) -> None:
    busy = next(note for note in made.notes if not note.quiet)
    gateway = busy.processes[GATEWAY]
    large = dataclasses.replace(gateway, rss=gateway.rss + 100 * made.load.allowed_bytes)
    made.notes.append(dataclasses.replace(busy, processes={GATEWAY: large, ENGINE: busy.processes[ENGINE]}))
    assert "MiB more than without streams" in made.faults()[-1]
