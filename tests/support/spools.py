"""Spools for tests: small, with a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from agent.mqtt.spool.gaps import Gap
from agent.mqtt.spool.lane import Entry
from agent.mqtt.spool.policy import Drop, Limits, Policy
from agent.mqtt.spool.spool import Gaps, Spool

POLICIES = {
    "m": Policy(256 << 10, 3600, Drop.OLDEST),
    "e": Policy(128 << 10, 0, Drop.NEWEST),
    "a": Policy(128 << 10, 0, Drop.NEWEST),
}


def told(gap: Gap, now: float) -> bytes:
    """The body of a message about a gap."""
    return json.dumps([gap.stream, gap.session, gap.first, gap.last]).encode()


GAPS = Gaps("e", "agent/e/gap", told)
LIMITS = Limits(free_floor_bytes=0, segment_bytes=16 << 10)


def opened(
    folder: Path,
    session: str = "s1",
    now: float = 0.0,
    policies: Mapping[str, Policy] = POLICIES,
    limits: Limits = LIMITS,
    boot: str = "b1",
) -> Spool:
    return Spool.open(folder, session, policies, GAPS, now, boot, limits)


def waiting(spool: Spool, now: float = 0.0) -> list[tuple[str, str, int, bytes]]:
    """All that waits, but for what tells of gaps, as (session, stream, seq, body)."""
    entries = [each for take in (spool.replay, spool.live) for each in paged(take, now)]
    return [(each.session, each.stream, each.seq, each.body) for each in entries if each.stream != GAPS.stream]


def paged(take: Callable[[int, float, int], Sequence[Entry]], now: float) -> Iterator[Entry]:
    """What is taken a few at a time."""
    after = -1
    while entries := take(50, now, after):
        yield from entries
        after = entries[-1].position


def balanced(spool: Spool) -> bool:
    """Whether the law of conservation holds for each kind."""
    return all(counts.balanced for counts in spool.figures.by_kind.values())
