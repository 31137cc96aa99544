"""Schedules: how many, when, and of which kind."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.load.arrivals import Arrival, Pick, Share, Spacing, arrivals, picks

ONE = (Share(1, 3),)


def schedule(
    rate: float, spacing: Spacing, duration: float = 10, requests: int | None = None, warmup: float = 0, seed: int = 0
) -> list[Arrival]:
    return list(arrivals(rate, spacing, warmup, duration, requests, picks(ONE, seed), seed))


@given(st.integers(1, 400), st.integers(1, 5), st.integers(0, 3))
def test_even_arrivals_are_exactly_as_many(rate: int, seconds: int, warmup: int) -> None:
    offsets = [a.offset_s for a in schedule(rate, Spacing.FIXED, seconds, warmup=warmup)]
    counted = [offset for offset in offsets if offset >= 0]
    assert counted == [number / rate for number in range(rate * seconds)]
    assert len(offsets) - len(counted) == rate * warmup


@given(st.sampled_from(Spacing), st.floats(0.5, 500), st.floats(0, 2), st.integers(1, 50), st.integers(0, 99))
def test_schedules(spacing: Spacing, rate: float, warmup: float, requests: int, seed: int) -> None:
    made = schedule(rate, spacing, requests=requests, warmup=warmup, seed=seed)
    offsets = [a.offset_s for a in made]
    assert offsets == sorted(offsets)
    assert offsets[0] >= -warmup
    assert sum(offset >= 0 for offset in offsets) == requests
    assert made == schedule(rate, spacing, requests=requests, warmup=warmup, seed=seed)


def test_random_arrivals_have_the_rate_and_the_spread_of_poisson() -> None:
    offsets = [a.offset_s for a in schedule(1000, Spacing.POISSON, 100)]
    assert len(offsets) == pytest.approx(100_000, rel=0.02)
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    # Exponential: the standard deviation is the mean, and 1/e of all gaps are longer than it.
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2e-6, rel=0.05)
    assert sum(gap > 1e-3 for gap in gaps) / len(gaps) == pytest.approx(0.3679, rel=0.05)
    assert schedule(1000, Spacing.POISSON, 1, seed=1) != schedule(1000, Spacing.POISSON, 1, seed=2)


def test_the_mix_has_its_weights_and_all_samples() -> None:
    mix = (Share(60, 4), Share(25, 1), Share(15, 2))
    made = list(itertools.islice(picks(mix, 0), 20_000))
    kinds = Counter(pick.kind for pick in made)
    assert [kinds[kind] / 20_000 for kind in range(3)] == pytest.approx([0.6, 0.25, 0.15], abs=0.02)
    assert set(made) == {Pick(kind, sample) for kind, share in enumerate(mix) for sample in range(share.samples)}
    assert made == list(itertools.islice(picks(mix, 0), 20_000))
