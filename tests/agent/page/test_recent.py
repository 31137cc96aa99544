"""What was counted lately, and quantiles of counts."""

from __future__ import annotations

import pytest

from agent.errors import Reason
from agent.page.recent import EVERY_S, WINDOW_S, Counted, Recent, quantile


def counted(number: int, model: str = "m") -> Counted:
    return Counted({model: [number, 0]}, {Reason.DEADLINE: number})


def test_what_is_recent_is_what_was_counted_since() -> None:
    recent = Recent(0.0)
    assert recent.since(counted(3), 1.0) == (counted(3), 1.0)
    now = 0.0
    for look in range(200):
        now = look * EVERY_S
        recent.look(counted(look), now)
    found, seconds = recent.since(counted(200), now + 1)
    # A look that is as long ago as the window, or up to one look more.
    assert WINDOW_S <= seconds <= WINDOW_S + EVERY_S + 1
    assert found == counted(200 - round((now + 1 - seconds) / EVERY_S))


def test_a_model_that_came_later_counts_from_zero() -> None:
    recent = Recent(0.0)
    recent.look(counted(5, "old"), 10.0)
    found, _ = recent.since(Counted({"old": [6, 0], "new": [2, 1]}, {}), 11.0)
    assert found.answered["new"] == [2, 1]


@pytest.mark.parametrize(
    ("counts", "rank", "value"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 1.5),
        ([1, 1, 0], 0.5, 1.0),
        ([99, 1, 0], 0.99, 1.0),
        ([0, 0, 5], 0.5, 2.0),
        ([1, 0, 9], 0.99, 2.0),
    ],
)
def test_quantiles_are_those_of_prometheus(counts: list[int], rank: float, value: float | None) -> None:
    assert quantile((1.0, 2.0), counts, rank) == (None if value is None else pytest.approx(value))
