"""When requests are sent, decided ahead of all sending and of every answer. Pure and seeded."""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Spacing(str, enum.Enum):
    """How requests follow each other."""

    POISSON = "poisson"
    FIXED = "fixed"


class Pick(NamedTuple):
    """Which request: the kind's position in the mix, and the sample's within the kind."""

    kind: int
    sample: int


class Arrival(NamedTuple):
    """One request to send, `offset_s` after the measurement begins; before it (negative) to warm up only."""

    offset_s: float
    pick: Pick


class Share(NamedTuple):
    """A kind of request: its weight in the mix, and how many samples it has."""

    weight: float
    samples: int


def picks(mix: Sequence[Share], seed: int) -> Iterator[Pick]:
    """Endless: kinds by their weights, samples of a kind evenly."""
    draw = random.Random(f"picks {seed}")  # noqa: S311 - load, not secrets
    weights = list(itertools.accumulate(share.weight for share in mix))
    while True:
        (kind,) = draw.choices(range(len(mix)), cum_weights=weights)
        yield Pick(kind, draw.randrange(mix[kind].samples))


def arrivals(
    rate: float, spacing: Spacing, warmup_s: float, duration_s: float, requests: int | None, picked: Iterator[Pick],
    seed: int,
) -> Iterator[Arrival]:  # fmt: skip
    """Requests at `rate` a second from -warmup_s on, until duration_s or, if given, for that many after the warm-up."""
    offsets = _poisson(rate, -warmup_s, seed) if spacing is Spacing.POISSON else _fixed(rate, -warmup_s)
    counted = 0
    for offset in offsets:
        if (offset >= duration_s) if requests is None else (counted == requests):
            return
        counted += offset >= 0
        yield Arrival(offset, next(picked))


def _fixed(rate: float, start_s: float) -> Iterator[float]:
    # Counted from zero and not summed up, so that no error grows and one stands at 0 exactly.
    return (number / rate for number in itertools.count(math.ceil(start_s * rate)))


def _poisson(rate: float, start_s: float, seed: int) -> Iterator[float]:
    draw = random.Random(f"arrivals {seed}")  # noqa: S311 - load, not secrets
    offset = start_s
    while True:
        offset += draw.expovariate(rate)
        yield offset
