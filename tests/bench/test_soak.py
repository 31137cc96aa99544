"""The soak in short: real clients against a real agent, and what it makes of what it notes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from bench.soak import CLIENTS, ENGINE, GATEWAY, Note, Process, faults, report, soak
from tests.support import bundles
from tests.support.agents import serving

MIB = 1 << 20
GOOD = Process(rss=100 * MIB, anonymous=60 * MIB, file=2 * MIB, shared=MIB, descriptors=17, threads=8)


def notes_of(**changes: int) -> list[Note]:
    """Two quiet moments with load between them; at the last the engine is as the changes say."""
    loaded = dataclasses.replace(GOOD, descriptors=60, rss=2 * GOOD.rss)
    last = {GATEWAY: GOOD, ENGINE: dataclasses.replace(GOOD, **changes)}
    return [
        Note(60.0, 100, True, {GATEWAY: GOOD, ENGINE: GOOD}),
        Note(90.0, 200, False, {GATEWAY: loaded, ENGINE: loaded}),
        Note(120.0, 300, True, last),
    ]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"rss": GOOD.rss + MIB - 1}, []),
        ({"rss": GOOD.rss + MIB}, ["the engine's resident memory grew by 1.00%"]),
        ({"rss": GOOD.rss - MIB, "descriptors": 16}, []),
        ({"descriptors": 18}, ["the engine has 18 descriptors, 17 after warming up"]),
        ({"threads": 9}, ["the engine has 9 threads, 8 after warming up"]),
    ],
    ids=str,
)
def test_what_grew_is_found(changes: dict[str, int], found: list[str]) -> None:
    assert faults(notes_of(**changes), []) == found


def test_answers_that_were_not_expected_are_told_once() -> None:
    assert faults(notes_of(), ["answered: 500", "answered: 500", "too late: 200"]) == ["answered: 500", "too late: 200"]


def test_nothing_leaks_and_every_answer_is_one_to_be_expected(tmp_path: Path) -> None:
    """Whether memory grows, and threads beyond those of bounded pools, shows only after longer."""
    bundle = bundles.picking(tmp_path / "picking.tfb", 8)
    with serving(bundle, tmp_path / "log") as agent:
        made = asyncio.run(soak(agent, 4.0, 600, warm_s=2.0, warm_requests=300))
        assert agent.stop() == 0
        assert "Traceback" not in agent.log
    found = faults(made.notes, made.wrong)
    assert [each for each in found if "memory" not in each and "threads" not in each] == []
    assert max(note.processes[GATEWAY].threads for note in made.notes) < 20
    assert made.seen.total() >= 600
    assert made.seen["answered"] > made.seen["run fails"] > 0
    assert max(note.processes[GATEWAY].descriptors for note in made.notes) >= CLIENTS
    assert f"{made.seen.total():,} requests" in report(made.notes, made.seen, [], "")
