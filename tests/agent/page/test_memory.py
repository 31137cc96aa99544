"""Plans by part, and figures that are measured no more often than they need be."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from agent.page import memory
from agent.page.memory import Meter, planned
from targets.budget import Term


def test_a_plan_by_part_and_kind_counts_every_byte() -> None:
    terms = [
        Term("runtime", "anonymous", 1),
        Term("weights", "anonymous", 2),
        Term("mapped_weights", "file", 4),
        Term("ring", "shared", 8),
        Term("io_slots", "shared", 16),
        Term("new in another version", "anonymous", 32),
        Term("activations", "anonymous", 0),
    ]
    found = planned(terms, 64)
    assert found == {
        ("weights", "anonymous"): 2,
        ("weights", "file"): 4,
        ("weights", "shared"): 8,
        ("slots", "shared"): 16,
        ("runtime", "anonymous"): 33,
        ("answers", "anonymous"): 64,
    }
    assert [part for part, _ in found] == ["weights"] * 3 + ["slots", "runtime", "answers"]


def test_it_is_measured_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []

    def walk(pid: int) -> dict[str, int]:
        walked.append(pid)
        return {"anonymous": 7}

    monkeypatch.setattr(memory, "pss_by_kind", walk)

    async def ask() -> None:
        meter = Meter(lambda: [("m", 1), ("starts", None)])
        answers = await asyncio.gather(*(meter.read() for _ in range(100)))
        assert walked == [os.getpid(), 1]
        assert {each.used for each in answers} == {(("", "anonymous", 7), ("m", "anonymous", 7))}
        old = answers[0].at
        # What is old is answered all the same, and measured for the next.
        monkeypatch.setattr(memory, "EVERY_S", 0.0)
        assert (await meter.read()).at == old
        end = time.monotonic() + 60
        while (await meter.read()).at == old:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        meter.close()

    asyncio.run(ask())
