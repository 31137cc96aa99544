"""Windows cover a sequence once, whole, and as near to their middles as can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from targets.tensor import Contract, DimRange, DType, TensorSpec
from targets.windows import Join, Split, Window, windows


@st.composite
def splits(draw: st.DrawFn) -> Split:
    grain = draw(st.integers(1, 4))
    overlap = grain * draw(st.integers(0, 10))
    window = overlap + grain * draw(st.integers(1, 20))
    return Split("t", window, overlap, window + 400, (Join(0, 1, grain), Join()))


def test_a_sequence_in_windows() -> None:
    split = Split("t", 10, 4, 100, (Join(1),))
    assert windows(split, 20) == (Window(0, 10, 0, 8), Window(6, 16, 8, 13), Window(10, 20, 13, 20))


@given(splits(), st.integers(0, 400))
def test_every_position_is_answered_once(split: Split, more: int) -> None:
    seen = windows(split, split.window + more)
    assert [position for each in seen for position in range(each.keep, each.end)] == list(range(split.window + more))
    assert all(each.start <= each.keep < each.end <= each.stop for each in seen)


@given(splits(), st.integers(1, 400))
def test_windows_are_whole_and_begin_at_the_grain(split: Split, more: int) -> None:
    seen = windows(split, split.window + more)
    assert {each.stop - each.start for each in seen[:-1]} == {split.window}
    assert split.shortest <= seen[-1].stop - seen[-1].start <= split.window
    assert all(each.start % split.grain == each.keep % split.grain == 0 for each in seen)


@given(splits(), st.integers(1, 400))
def test_what_is_kept_is_half_the_overlap_away_from_every_edge(split: Split, more: int) -> None:
    for one, other in pairwise(windows(split, split.window + more)):
        shared = one.stop - other.start
        assert shared >= split.overlap
        assert other.keep - other.start > shared / 2 - split.grain
        assert one.stop - one.end >= shared / 2 - split.grain


@given(splits(), st.integers(1, 400))
def test_there_are_no_more_windows_than_needed(split: Split, more: int) -> None:
    stride = split.window - split.overlap
    assert len(windows(split, split.window + more)) <= 1 + -(-(more + split.grain - 1) // stride)


def test_what_fits_is_not_cut() -> None:
    split = Split("t", 10, 4, 100, (Join(1),))
    assert windows(split, 10) == (Window(0, 10, 0, 10),)
    with pytest.raises(ValueError, match="101 positions are more than 100"):
        windows(split, 101)


@pytest.mark.parametrize(
    ("window", "overlap", "of"),
    [(0, 0, 1), (4, 4, 1), (4, -1, 1), (101, 0, 1), (10, 3, 2), (9, 2, 2)],
    ids=["no window", "no progress", "negative", "longer than the longest", "half a position", "not whole"],
)
def test_what_are_no_windows(window: int, overlap: int, of: int) -> None:
    with pytest.raises(ValueError, match=r"not windows|do not join"):
        Split("t", window, overlap, 100, (Join(0, 1, of),))


X = TensorSpec("x", DType.FLOAT32, (2, "t"), 2 * 16 * 4)
Y = TensorSpec("y", DType.FLOAT32, (2, "y_1"), 2 * 8 * 4)


def contract(split: Split, taken: TensorSpec = X, given: TensorSpec = Y, batch: str | None = None) -> Contract:
    return Contract((taken,), (given,), {"t": DimRange(1, 16, 16)}, batch, split)


def test_the_whole_contract_is_that_of_the_longest() -> None:
    whole = contract(Split("t", 16, 4, 101, (Join(1, 1, 2),))).whole
    assert (whole.dims["t"], whole.split) == (DimRange(1, 16, 101), UNSET)
    assert [spec.max_nbytes for spec in (*whole.inputs, *whole.outputs)] == [2 * 101 * 4, 2 * 51 * 4]
    assert whole.whole is whole
    whole.check_inputs({"x": (DType.FLOAT32, (2, 101))})


def test_a_contract_without_a_split_is_written_as_before() -> None:
    assert b"split" not in msgspec.json.encode(Contract((X,), (Y,), {"t": DimRange(1, 16, 16)}))


SPLIT = Split("t", 16, 4, 101, (Join(1, 1, 2),))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: contract(replace(SPLIT, dim="s")),
        lambda: contract(replace(SPLIT, window=14)),
        lambda: contract(replace(SPLIT, joins=())),
        lambda: contract(replace(SPLIT, joins=(Join(2),))),
        lambda: contract(SPLIT, taken=replace(X, shape=("t", "t"))),
        lambda: contract(SPLIT, taken=replace(X, dtype=DType.STRING)),
        lambda: contract(SPLIT, given=replace(Y, dtype=DType.STRING)),
        lambda: contract(SPLIT, replace(X, shape=("t", 2)), replace(Y, shape=("t", 2)), "t"),
    ],
    ids=[
        "no such dimension",
        "not its largest size",
        "too few joins",
        "no such axis",
        "twice in one input",
        "strings in",
        "strings out",
        "the batch",
    ],
)
def test_splits_that_do_not_go_with_the_contract(wrong: Callable[[], Contract]) -> None:
    with pytest.raises(ValueError, match=r"windows of|cannot be"):
        wrong()
