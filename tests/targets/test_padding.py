"""Which requests can be put together, and what a contract may say of padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from targets.tensor import Contract, DimRange, DType, Padding, TensorSpec

X = TensorSpec("x", DType.FLOAT32, ("n", "t", 4), 9999)
MASK = TensorSpec("mask", DType.INT64, ("n", "t"), 9999)
Y = TensorSpec("y", DType.FLOAT32, ("n", 4, "t"), 9999)
DIMS = {"n": DimRange(1, 1, 4), "t": DimRange(1, 16, 16, (4, 16))}
CONTRACT = Contract((X, MASK), (Y,), DIMS, "n")
PADDED = replace(CONTRACT, pad=Padding("t", (2,)))


def test_requests_of_one_shape_apart_from_rows_are_alike() -> None:
    assert CONTRACT.alike(((1, 3, 4), (1, 3))) == CONTRACT.alike(((2, 3, 4), (2, 3))) == ((3, 4), (3,))
    assert CONTRACT.alike(((1, 3, 4), (1, 3))) != CONTRACT.alike(((1, 4, 4), (1, 4)))


def test_requests_of_one_bucket_are_alike_where_they_can_be_padded() -> None:
    assert PADDED.alike(((1, 3, 4), (1, 3))) == PADDED.alike(((2, 4, 4), (2, 4))) == ((4, 4), (4,))
    assert PADDED.alike(((1, 4, 4), (1, 4))) != PADDED.alike(((1, 5, 4), (1, 5)))


def test_the_size_of_a_dimension() -> None:
    assert (PADDED.size_of("t", ((1, 3, 4), (1, 3))), PADDED.size_of("n", ((2, 3, 4), (2, 3)))) == (3, 2)
    with pytest.raises(KeyError):
        PADDED.size_of("s", ((1, 3, 4), (1, 3)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: replace(PADDED, pad=Padding("s", (2,))),
        lambda: replace(PADDED, pad=Padding("n", (2,))),
        lambda: replace(PADDED, batch=None),
        lambda: replace(PADDED, pad=Padding("t", ())),
        lambda: replace(PADDED, pad=Padding("t", (0,))),
        lambda: replace(PADDED, pad=Padding("t", (3,))),
        lambda: replace(PADDED, inputs=(replace(X, shape=("n", "t", "t")), MASK)),
        lambda: replace(PADDED, inputs=(X, replace(MASK, dtype=DType.STRING))),
    ],
    ids=["no such dimension", "the batch", "no batch", "too few axes", "rows", "no such axis", "twice", "strings"],
)
def test_padding_that_does_not_go_with_the_contract(wrong: Callable[[], Contract]) -> None:
    with pytest.raises(ValueError, match=r"padd|has no axis"):
        wrong()
