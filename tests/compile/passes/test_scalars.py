"""Range takes scalars: what an exporter gives it as a vector of one element is reshaped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from tests.support.models import emit, model, node, run, save, value


def test_a_range_over_a_split_of_a_shape_loads_once_the_shape_is_known(tmp_path: Path) -> None:
    one = onnx.numpy_helper.from_array(np.array([1]), "one_value")
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Split", ["shape"], ["rows", "columns"], axis=0, num_outputs=2),
        node("Constant", [], ["zero"], value_int=0),
        node("Constant", [], ["one"], value=one),
        node("Range", ["zero", "columns", "one"], ["y"]),
    ]
    path = save(
        tmp_path, model(nodes, [value("x", ["n", "m"])], [value("y", [None], onnx.TensorProto.INT64)], opset=18)
    )
    segment, _ = emit(path, "fp32", tmp_path, "x=1..4,1..7")
    for rows, columns in ((1, 1), (2, 7)):
        made = run(segment, {"x": np.zeros((rows, columns), np.float32)})
        np.testing.assert_array_equal(made["y"], np.arange(columns))
