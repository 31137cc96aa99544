"""What windows gave, put together, beside what the whole gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from processing.windows import Joined, cut
from targets.windows import Join, Split, Window, windows


def joined(join: Join, seen: Sequence[Window], values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    whole = Joined(join, seen[-1].end)
    for window, value in zip(seen, values, strict=True):
        whole.add(window, value)
    return whole.result()


def filtered(x: NDArray[Any], taps: int, stride: int) -> NDArray[Any]:
    """A convolution along axis 1 with zeros around it, `taps` odd: what a layer of a network computes. x: [rows, t]."""
    padded = np.pad(x, ((0, 0), (taps // 2, taps // 2)))
    kernel = np.arange(1, taps + 1)
    return np.stack([(padded[:, at : at + taps] * kernel).sum(1) for at in range(0, x.shape[1], stride)], 1)


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 5), st.integers(0, 120))
def test_exact_where_half_the_overlap_is_what_the_model_sees(reach: int, stride: int, steps: int, more: int) -> None:
    overlap = -(-2 * (reach + stride) // stride) * stride
    window = overlap + steps * stride
    split = Split("t", window, overlap, 1000, (Join(1, 1, stride),))
    x = np.random.default_rng(0).integers(-9, 9, (2, window + more))
    seen = windows(split, x.shape[1])
    values = [filtered(cut(x, 1, each), 2 * reach + 1, stride) for each in seen]
    assert np.array_equal(joined(split.joins[0], seen, values), filtered(x, 2 * reach + 1, stride))


def test_more_positions_than_the_sequence_has() -> None:
    split = Split("t", 6, 2, 100, (Join(0, 3, 1),))
    x = np.arange(20)
    seen = windows(split, 20)
    assert np.array_equal(
        joined(split.joins[0], seen, [np.repeat(cut(x, 0, each), 3) for each in seen]), np.repeat(x, 3)
    )


def test_the_mean_weighs_every_position_alike() -> None:
    split = Split("t", 4, 0, 100, (Join(),))
    x = np.arange(10, dtype=np.float32)
    seen = windows(split, 10)
    assert [each.end - each.keep for each in seen] == [4, 3, 3]
    mean = joined(split.joins[0], seen, [cut(x, 0, each).mean(keepdims=True) for each in seen])
    assert mean.dtype == np.float32
    assert mean == pytest.approx([(1.5 * 4 + 5.5 * 3 + 7.5 * 3) / 10])


def test_what_is_kept_is_a_copy() -> None:
    """A slot has the next window's values when they are joined."""
    split, slot = Split("t", 4, 0, 100, (Join(0),)), np.zeros(4)
    whole = Joined(split.joins[0], 8)
    for number, window in enumerate(windows(split, 8)):
        slot[:] = number
        whole.add(window, slot)
    assert whole.result().tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(("shape", "words"), [((4, 2), "does not go into"), ((5,), "from 4 on")])
def test_windows_that_do_not_go_together(shape: tuple[int, ...], words: str) -> None:
    split = Split("t", 4, 0, 100, (Join(0),))
    first, last = windows(split, 8)
    whole = Joined(split.joins[0], 8)
    whole.add(first, np.ones(4))
    with pytest.raises(ValueError, match=rf"a window made .* {words}"):
        whole.add(last, np.ones(shape))


def test_a_last_window_may_give_less_where_the_sequence_is_odd() -> None:
    """One for every two, and of an odd one none."""
    split = Split("t", 4, 0, 100, (Join(0, 1, 2),))
    seen = windows(split, 7)
    assert joined(split.joins[0], seen, [np.ones(2), np.zeros(1)]).tolist() == [1.0, 1.0, 0.0]


def test_a_window_that_gave_too_little() -> None:
    split = Split("t", 4, 0, 100, (Join(0),))
    with pytest.raises(ValueError, match="a window made 3 positions on axis 0, 4 are needed"):
        joined(split.joins[0], windows(split, 8), [np.ones(3), np.ones(3)])
