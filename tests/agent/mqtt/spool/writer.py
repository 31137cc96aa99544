"""Writes to a spool until it is killed: `python writer.py FOLDER SESSION`. Says what is durable, and what it delivers.

Each line is `ack SESSION NUMBER` or `del SESSION NUMBER`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from agent.mqtt.spool.policy import Drop, Limits, Policy
from agent.mqtt.spool.spool import Gaps, Spool

BIG = 1 << 30
POLICIES = {"m": Policy(BIG), "e": Policy(BIG, drop=Drop.NEWEST), "a": Policy(BIG, drop=Drop.NEWEST)}
GAPS = Gaps("e", "gap", lambda gap, _: repr(gap).encode())
LIMITS = Limits(segment_bytes=64 << 10, notes_bytes=8 << 10, free_floor_bytes=0)


def main() -> None:
    folder, session = Path(sys.argv[1]), sys.argv[2]
    spool = Spool.open(folder, session, POLICIES, GAPS, time.monotonic(), "boot", LIMITS)
    spool.connected()
    number, waiting = 0, list[tuple[int, str]]()
    while True:
        now = time.monotonic()
        for _ in range(20):
            kind = "mmmmmmea"[number % 8]
            position = spool.append(kind, f"{kind}/t", f"{session} {number} ".encode() + b"x" * (number % 700), now)
            assert position is not None
            waiting.append((position, f"ack {session} {number}\n"))
            number += 1
        durable = spool.sync(now)
        told = [line for position, line in waiting if position <= durable]
        del waiting[: len(told)]
        # One write: a line that is half there was said by nobody.
        os.write(1, "".join(told).encode())
        for entry in [*spool.live(7, now), *spool.replay(6, now)]:
            os.write(1, b"del %s %s\n" % tuple(entry.body.split(b" ")[:2]))
            spool.delivered(entry.position, now)


if __name__ == "__main__":
    main()
