"""Results that are waited for: who follows is woken, who publishes waits for those who block, in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from agent.bell import Bell
from agent.feed import Feed
from agent.results import Closed, Kept, Missed, Policy, Position, Results


def feed(entries: int = 2, patience_s: float = 30.0) -> Feed[str]:
    return Feed(Results("e", 1 << 20, entries, patience_s), time.monotonic)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_bell_that_rang_before_is_heard() -> None:
    async def test() -> None:
        bell = Bell()
        bell.ring()
        await bell.wait()
        await bell.wait(0.001)
        waiting = asyncio.create_task(bell.wait())
        await settle()
        assert not waiting.done()
        bell.ring()
        await waiting

    run(test())


def test_who_follows_is_woken() -> None:
    async def test() -> None:
        results = feed()
        follower = results.follow(Policy.LATEST, None)
        assert follower.take() is None
        waiting = asyncio.create_task(follower.wait(30))
        await settle()
        assert results.put("a", 1)
        await waiting
        assert follower.take() == Kept(1, "a")
        follower.close()
        assert results.results.readers == 0

    run(test())


def test_who_comes_back_gets_all_that_is_kept() -> None:
    async def test() -> None:
        results = feed(entries=100)
        for _ in range(150):
            results.put("r", 1)
        follower = results.follow(Policy.LATEST, Position("e", 10))
        assert follower.take() == Missed(11, 50)
        assert [follower.take() for _ in range(101)] == [*(Kept(seq, "r") for seq in range(51, 151)), None]

    run(test())


def test_results_wait_for_a_reader_that_blocks_and_stay_in_turn() -> None:
    async def test() -> None:
        results = feed()
        follower = results.follow(Policy.BLOCK, None)
        await results.put_when_possible("1", 1)
        await results.put_when_possible("2", 1)
        waiting = [asyncio.create_task(results.put_when_possible(text, 1)) for text in "345"]
        await settle()
        assert [task.done() for task in waiting] == [False] * 3
        assert follower.take() == Kept(1, "1")
        await settle()
        assert [task.done() for task in waiting] == [True, False, False]
        waiting[1].cancel()
        assert follower.take() == Kept(2, "2")
        await waiting[2]
        assert [follower.take() for _ in range(3)] == [Kept(3, "3"), Kept(4, "5"), None]

    run(test())


def test_results_do_not_wait_for_one_that_is_gone() -> None:
    async def test() -> None:
        results = feed()
        follower = results.follow(Policy.BLOCK, None)
        for text in "12":
            await results.put_when_possible(text, 1)
        waiting = asyncio.create_task(results.put_when_possible("3", 1))
        await settle()
        follower.close()
        await waiting

    run(test())


def test_results_wait_only_so_long_for_one_that_takes_nothing() -> None:
    async def test() -> None:
        results = feed(patience_s=0.05)
        follower = results.follow(Policy.BLOCK, None)
        for text in "12":
            await results.put_when_possible(text, 1)
        await asyncio.gather(*(results.put_when_possible(text, 1) for text in "34"))
        assert isinstance(follower.take(), Closed)

    run(test())
