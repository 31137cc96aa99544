"""The spool on a loop: what is awaited is durable, and the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from agent.mqtt.spool.keeper import Keeper
from tests.support.spools import balanced, opened, waiting


def test_what_is_awaited_is_durable(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper(opened(tmp_path, now=time.monotonic()), time.monotonic)
        arrived = asyncio.Event()
        keeper.arrived = arrived.set
        keeper.start()
        many = [keeper.append("m", "t", b"%d" % number) for number in range(500)]
        positions = await asyncio.gather(*many, keeper.append("a", "u", b"alarm", urgent=True))
        assert positions == [*range(501)]
        await arrived.wait()
        entries = keeper.live(1000)
        assert [each.position for each in entries] == [*range(501)]
        for entry in entries[:100]:
            keeper.delivered(entry.position)
        keeper.rejected(100, "too_large")
        keeper.put("m", "t", b"not awaited")
        await keeper.stop()

    asyncio.run(main())
    spool = opened(tmp_path, "s2")
    assert [each[2] for each in waiting(spool) if each[1] == "t"] == [*range(101, 501)]
    assert balanced(spool)
