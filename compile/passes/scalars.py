"""Operands that must be scalars and are vectors of one element: runtimes take those until they know the shape."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from compile.graph import FreshNames, constant, ir, nodes_of
from compile.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class ScalarRanges(Pass):
    """Give one-element operands of Range rank 0.

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
                        node.replace_input_with(index, _scalar(model, node.graph, node, value, names))


def _is_one(shape: ir.Shape) -> bool:
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return 0 < len(sizes) == len(shape) and math.prod(sizes) == 1


def _scalar(model: ir.Model, graph: ir.Graph, node: ir.Node, value: ir.Value, names: FreshNames) -> ir.Value:
    """The same with rank 0: a constant of a constant, else what a new node in front of `node` gives."""
    tensor = constant(value)
    if tensor is not None:
        return _constant(model, names.make(f"{value.name}.scalar"), tensor.numpy().reshape(()))
    shape = _constant(model, names.make("scalar_shape"), np.array([], np.int64))
    reshape = ir.node("Reshape", [value, shape])
    result = reshape.outputs[0]
    result.name, result.type, result.shape = names.make(f"{value.name}.scalar"), value.type, ir.Shape([])
    graph.insert_before(node, reshape)
    return result


def _constant(model: ir.Model, name: str, data: npt.NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(data, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(data.shape))
    model.graph.register_initializer(value)
    return value
