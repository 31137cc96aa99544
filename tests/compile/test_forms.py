"""The source model in the forms it is cut by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from compile.forms import SourceForms
from compile.shapes import parse_shape

MASKED = """
<ir_version: 8, opset_import: ["" : 17]>
causal (int64[1, t] ids, float[1, p, 8] past) => (float[1, t, n] y)
<int64[1] axis = {1}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] one = {1},
 float minus = {-1.0}, float nought = {0.0}>
{
    shape = Shape(ids)
    t = Slice(shape, axis, two)
    pasts = Shape(past)
    p = Slice(pasts, axis, two)
    n = Add(t, p)
    end = Squeeze(n)
    begin = Squeeze(p)
    step = Squeeze(one)
    start = Squeeze(zero)
    rows = Range(begin, end, one)
    columns = Range(start, end, step)
    tall = Unsqueeze(rows, one)
    wide = Unsqueeze(columns, zero)
    seen = LessOrEqual(wide, tall)
    mask = Where(seen, nought, minus)
    h = Gather(table, ids)
    flat = ReduceSum <keepdims=1> (h, two)
    y = Add(flat, mask)
}
"""


def test_every_value_of_a_causal_mask_has_a_size_at_the_largest_shapes(tmp_path: Path) -> None:
    """It is computed from sizes alone, so that cuts can be where it crosses; the exporter's Range of a vector too."""
    model = parser.parse_model(MASKED)
    table = np.random.default_rng(0).standard_normal((50, 8), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    path = tmp_path / "masked.onnx"
    onnx.save(model, path)
    forms = SourceForms(path, [parse_shape("ids=1,1..4..16"), parse_shape("past=1,0..64,8")], (), None)
    assert forms.sizes["mask"] == 16 * 80 * 4
    assert forms.sizes["h"] == 16 * 8 * 4
    assert forms.sizes["seen"] == 16 * 80
