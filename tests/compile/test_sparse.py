"""Sparse tensors made dense: the same values wherever they stand, and no allocation before the shape is checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from compile import sparse
from compile.errors import ModelError
from compile.sparse import densify
from tests.support.models import init, model, node, value

HERE = Path("model.onnx")


def holding(*tensors: tuple[str, np.ndarray, np.ndarray, tuple[int, ...]]) -> object:
    made = model([node("Relu", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])
    for name, values, indices, dims in tensors:
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(init(name, values), init("", indices), dims))
    return made


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(["float32", "int64", "uint8", "float16"]),
    st.booleans(),
)
def test_every_value_stands_where_its_index_says(dims: list[int], random: object, dtype: str, by_axis: bool) -> None:
    size = int(np.prod(dims))
    places = np.array(sorted(random.sample(range(size), random.randint(0, size))), np.int64)  # type: ignore[attr-defined]
    dense = np.zeros(size, dtype)
    dense[places] = np.arange(1, len(places) + 1)
    indices = np.stack(np.unravel_index(places, dims), axis=1) if by_axis else places
    proto = holding(("w", dense[places], indices.astype(np.int64), tuple(dims)))
    densify(proto, HERE)  # type: ignore[arg-type]
    graph = proto.graph  # type: ignore[attr-defined]
    assert not graph.sparse_initializer
    (tensor,) = graph.initializer
    assert tensor.name == "w"
    found = numpy_helper.to_array(tensor)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, dense.reshape(dims))


def test_what_all_take_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "MAX_DENSE_BYTES", 1000)
    one = np.ones(1, np.float32), np.zeros(1, np.int64), (10, 10)
    densify(holding(*[(f"w{i}", *one) for i in range(2)]), HERE)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"'w2' of shape \[10, 10\] takes 400 B made dense"):
        densify(holding(*[(f"w{i}", *one) for i in range(3)]), HERE)  # type: ignore[arg-type]
