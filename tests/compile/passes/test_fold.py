"""Folding computes what is small, and never what is large."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from tests.support.models import init, model, node, normal, prepared, save, value


def test_what_follows_from_constants_is_computed(tmp_path: Path) -> None:
    nodes = [node("Add", ["a", "b"], ["c"]), node("Mul", ["c", "c"], ["d"]), node("Mul", ["x", "d"], ["y"])]
    weights = [init("a", np.float32(1)), init("b", np.float32(2))]
    graph = prepared(save(tmp_path, model(nodes, [value("x", [4])], [value("y", [4])], weights)))
    assert [n.op_type for n in graph.graph] == ["Mul"]
    (factor,) = graph.graph.initializers.values()
    assert factor.const_value is not None
    assert factor.const_value.numpy() == 9


HUGE = 60_000
BOMBS = {
    "ConstantOfShape": ([node("ConstantOfShape", ["shape"], ["c"])], [init("shape", np.array([HUGE, HUGE]))]),
    "Expand": (
        [node("Expand", ["one", "shape"], ["c"])],
        [init("one", np.float32(1)), init("shape", np.array([HUGE, HUGE]))],
    ),
    "Tile": ([node("Tile", ["one", "n"], ["c"])], [init("one", normal(1)), init("n", np.array([HUGE * HUGE]))]),
    "outer product": (
        [node("Mul", ["a", "b"], ["c"])],
        [init("a", normal(16000, 1)), init("b", normal(1, 16000))],
    ),
    "MatMul": ([node("MatMul", ["a", "b"], ["c"])], [init("a", normal(16000, 1)), init("b", normal(1, 16000))]),
    "Gather": (
        [node("Gather", ["a", "i"], ["c"])],
        [init("a", normal(1, 16000)), init("i", np.zeros(16000, np.int64))],
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_asks_for_much_is_not_folded(tmp_path: Path, bomb: str) -> None:
    nodes, weights = BOMBS[bomb]
    nodes = [*nodes, node("Shape", ["c"], ["s"]), node("Identity", ["c"], ["out"])]
    outputs = [value("s", None, TensorProto.INT64), value("out", None)]
    path = save(tmp_path, model(nodes, [value("x", [1])], outputs, weights))
    tracemalloc.start()
    try:
        graph = prepared(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bomb.split(maxsplit=1)[0] in [n.op_type for n in graph.graph] or bomb == "outer product"
    assert peak < 32 << 20
