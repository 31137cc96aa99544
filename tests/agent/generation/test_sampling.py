"""Which token is next."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.generation.sampling import Sampler, Sampling

SCORES = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))


def picked(sampling: Sampling, count: int = 4000) -> dict[int, float]:
    sampler = Sampler(sampling)
    seen = Counter(sampler.pick(SCORES) for _ in range(count))
    return {token: number / count for token, number in seen.items()}


@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0)])
def test_the_most_likely(how: Sampling) -> None:
    assert picked(how, 10) == {1: 1.0}


def test_as_likely_as_the_scores_say() -> None:
    seen = picked(Sampling(seed=0))
    assert [seen[token] for token in range(4)] == pytest.approx([0.1, 0.4, 0.3, 0.2], abs=0.03)


def test_temperature_flattens_and_sharpens() -> None:
    assert picked(Sampling(temperature=100, seed=0))[0] == pytest.approx(0.25, abs=0.03)
    assert picked(Sampling(temperature=0.1, seed=0))[1] > 0.9


def test_of_the_most_likely_alone() -> None:
    assert picked(Sampling(top_k=2, seed=0)) == {1: pytest.approx(4 / 7, abs=0.03), 2: pytest.approx(3 / 7, abs=0.03)}
    # 0.4 and 0.3 are the fewest that have six tenths together; of these two thirds of 0.7 are the first alone.
    assert set(picked(Sampling(top_p=0.6, seed=0))) == {1, 2}
    assert set(picked(Sampling(top_p=0.35, seed=0))) == {1}
    assert set(picked(Sampling(top_k=3, top_p=0.99, seed=0))) == {1, 2, 3}


def test_equal_seeds_choose_equally() -> None:
    first, second, other = (Sampler(Sampling(seed=seed)) for seed in (7, 7, 8))
    made = [[sampler.pick(SCORES) for _ in range(50)] for sampler in (first, second, other)]
    assert made[0] == made[1] != made[2]


def test_what_cannot_be_is_never_chosen() -> None:
    scores = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    sampler = Sampler(Sampling(seed=0))
    assert {sampler.pick(scores) for _ in range(200)} == {1, 3}


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_none(wrong: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        Sampler(Sampling()).pick(np.array([0, wrong, 1], np.float32))


def test_how_likely_it_was() -> None:
    assert Sampler(Sampling()).logprob(SCORES + 5, 2) == pytest.approx(np.log(0.3), abs=1e-5)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.floats(0, 3),
    st.integers(0, 25),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_always_one_that_is_there(scores: list[float], temperature: float, k: int, p: float, seed: int) -> None:
    assert 0 <= Sampler(Sampling(temperature, k, p, seed)).pick(np.array(scores, np.float32)) < len(scores)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30), st.integers(0, 35), st.floats(0.01, 0.999))
def test_what_is_left_out_is_what_sorting_all_would_leave_out(scores: list[float], k: int, p: float) -> None:
    values = np.array(scores, np.float32)
    sampler = Sampler(Sampling(1.0, k, p, 0))
    chances = np.exp(values.astype(np.float64) - values.max())
    order = np.argsort(-chances, kind="stable")[: k or None]
    upto = np.cumsum(chances[order])
    # Where rounding decides, either may be right.
    allowed = {int(token) for token, before in zip(order, [0, *upto], strict=False) if before < p * upto[-1] + 1e-9}
    assert {sampler.pick(values) for _ in range(20)} <= allowed | {int(order[0])}
