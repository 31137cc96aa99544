"""What was counted lately, out of counters that only grow. Pure: time is an argument.

A count of the last minutes is what is counted now less what was counted then. So nothing is noted when a request ends;
the counters are looked at every few seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from agent.errors import Reason

EVERY_S = 10.0
WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Counted:
    """Since the agent was started: answers of each model by how long they took (as many as were at most each bound,
    but more than the bound before), and what was refused by reason."""

    answered: Mapping[str, Sequence[int]] = field(default_factory=dict)
    refused: Mapping[Reason, int] = field(default_factory=dict)

    def less(self, before: Counted) -> Counted:
        """What was counted since."""
        answered = {
            model: [now - then for now, then in zip(counts, before.answered.get(model, [0] * len(counts)), strict=True)]
            for model, counts in self.answered.items()
        }
        refused = {reason: count - before.refused.get(reason, 0) for reason, count in self.refused.items()}
        return Counted(answered, refused)


class Recent:
    """Keeps what was counted at the last looks, back to one that is `WINDOW_S` ago or a bit more."""

    def __init__(self, now: float) -> None:
        self._looks: deque[tuple[float, Counted]] = deque([(now, Counted())])

    def look(self, counted: Counted, now: float) -> None:
        """Note what is counted by now; to be called every `EVERY_S`."""
        self._looks.append((now, counted))
        while self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()

    def since(self, counted: Counted, now: float) -> tuple[Counted, float]:
        """(what was counted in the window that ends now, how many seconds that is)."""
        then, before = self._looks[0]
        return counted.less(before), now - then


def quantile(bounds: Sequence[float], counts: Sequence[int], rank: float) -> float | None:
    """The value that `rank` (0..1) of all do not exceed, as Prometheus' histogram_quantile has it: counts have no
    values, so those of one bucket are taken to be spread evenly. Past the last bound it is that bound; None of none."""
    total = sum(counts)
    if not total:
        return None
    wanted, before = rank * total, 0
    for (lower, upper), count in zip(pairwise((0.0, *bounds, math.inf)), counts, strict=True):
        if count and before + count >= wanted:
            return lower if math.isinf(upper) else lower + (upper - lower) * (wanted - before) / count
        before += count
    return bounds[-1]
