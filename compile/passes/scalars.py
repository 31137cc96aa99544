"""Operands that must be scalars and are vectors of one element: runtimes take those until they know the shape."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np

from compile.graph import FreshNames, ir, nodes_of
from compile.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class ScalarRanges(Pass):
    """Reshape one-element operands of Range to rank 0.

    An exporter's Split gives [1] where Range is specified for []; while the shape is unknown, a runtime lets it pass,
    and once folding has made it known the same runtime refuses the graph.
    """

    ensures: ClassVar = ("sorted",)

    def apply(self, model: ir.Model) -> None:
        names = FreshNames(model)
        for node in list(nodes_of(model)):
            if node.op_type == "Range" and node.domain == "" and node.graph is not None:
                for index, value in enumerate(node.inputs):
                    if value is not None and value.shape is not None and _is_one(value.shape):
                        reshape = _to_scalar(model, value, names)
                        node.graph.insert_before(node, reshape)
                        node.replace_input_with(index, reshape.outputs[0])


def _is_one(shape: ir.Shape) -> bool:
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return 0 < len(sizes) == len(shape) and math.prod(sizes) == 1


def _to_scalar(model: ir.Model, value: ir.Value, names: FreshNames) -> ir.Node:
    """A node that gives `value` rank 0."""
    target = ir.Value(name=names.make("scalar_shape"), const_value=ir.tensor(np.array([], np.int64)))
    target.shape, target.dtype = ir.Shape([0]), ir.DataType.INT64
    model.graph.register_initializer(target)
    reshape = ir.node("Reshape", [value, target])
    result = reshape.outputs[0]
    result.name, result.type, result.shape = names.make(f"{value.name}.scalar"), value.type, ir.Shape([])
    return reshape
