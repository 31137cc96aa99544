"""The best classes of an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent.http.classification import classified
from agent.strings import unpack_strings
from targets.tensor import DType
from tests.support.bundles import ONNX_TYPES, dense

NUMERIC = [dtype for dtype in ONNX_TYPES if dtype not in (DType.STRING, DType.BOOL)]


def best(values: Any, count: int, dtype: DType = DType.FLOAT32, batched: bool = False, labels: Any = ()) -> Any:
    array = np.array(values, dtype=dtype.numpy)
    spec, shape, data = classified(
        dense("y", dtype, *array.shape), array.shape, array.reshape(-1).view(np.uint8), count, batched, labels
    )
    assert (spec.name, spec.dtype, spec.shape) == ("y", DType.STRING, shape)
    return np.array(unpack_strings(data.data, int(np.prod(shape))), dtype=object).reshape(shape).tolist()


@pytest.mark.parametrize("dtype", NUMERIC)
def test_every_type(dtype: DType) -> None:
    one, ten = np.array([1, 10], dtype.numpy)
    assert best([1, 5, 10, 4], 2, dtype) == [f"{ten}:2".encode(), f"{one * 5}:1".encode()]


def test_the_examples_of_the_extension() -> None:
    assert best([1.1, 3.3, 0.5, 2.4], 2) == [b"3.3:1", b"2.4:3"]
    labels = ("index_0", "index_1", "index_2", "index_3")
    assert best([1.1, 3.3, 0.5, 2.4], 2, labels=labels) == [b"3.3:1:index_1", b"2.4:3:index_3"]
    assert best([[1, 5, 10, 4]], 2, DType.INT32, True, ("", "pickle", "apple", "")) == [[b"10:2:apple", b"5:1:pickle"]]


def test_rows_of_a_batch_and_what_is_none() -> None:
    values = [[1, 2, 3], [6, 5, 4]]
    assert best(values, 1, DType.INT8, True) == [[b"3:2"], [b"6:0"]]
    assert best(values, 2, DType.INT8) == [b"6:3", b"5:4"]
    assert best([[[1], [2]]], 9, DType.UINT64, True) == [[b"2:1", b"1:0"]]


def test_of_equal_values_the_first_comes_first() -> None:
    assert best([7, 9, 9, 7, 9], 4, DType.UINT8) == [b"9:1", b"9:2", b"9:4", b"7:0"]


def test_no_number_is_the_least() -> None:
    assert best([np.nan, -1.0, np.inf], 3) == [b"inf:2", b"-1.0:1", b"nan:0"]


@pytest.mark.parametrize(("shape", "given"), [((0, 3), (0, 2)), ((2, 0), (2, 0)), ((0,), (0, 1))])
def test_empty_outputs(shape: tuple[int, ...], given: tuple[int, ...]) -> None:
    _, found, data = classified(dense("y", DType.FLOAT32, *shape), shape, np.empty(0, np.uint8), 2, True, ())
    assert (found, data.nbytes) == (given, 0)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-4, 4, width=16)), st.integers(1, 50))
def test_they_are_what_sorting_gives(values: Any, count: int) -> None:
    rising = sorted(range(len(values)), key=lambda at: (-values[at], at))[:count]
    assert best(values, count) == [f"{values[at]!s}:{at}".encode() for at in rising]
