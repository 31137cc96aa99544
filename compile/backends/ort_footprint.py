"""Where onnxruntime keeps weights: which it copies when it lays them out anew, and which stay in the mapped file."""

from __future__ import annotations

from compile.backends.base import WeightFootprint
from compile.graph import ir


def weight_footprint(model: ir.Model) -> WeightFootprint:
    heap = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    return WeightFootprint(heap, 0, 0)
