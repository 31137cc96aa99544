"""FP16 models on runtimes that compute in FP32: the graph is widened, its weights stay 16 bits wide on disk."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compile.graph import FreshNames, bodies_of, graphs_of, ir
from compile.passes.base import Pass

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# Attributes whose integer is an element type.
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


@dataclasses.dataclass(frozen=True)
class WidenHalf(Pass):
    """Compute in FP32 what the model computes in FP16.

    Every FP16 weight gets a Cast behind it, which folding (small ones) and lowering (matrices) look through; inputs
    and outputs of the model keep their types, with a Cast inside. FP32 holds every FP16 value, so nothing is lost;
    what overflows in FP16 does not overflow afterwards.
    """

    requires: ClassVar = ("no_functions", "sorted", "unique_names")
    ensures: ClassVar = ("no_functions", "sorted", "unique_names")

    def apply(self, model: ir.Model) -> None:
        if not holds_half(model):
            return
        names = FreshNames(model)
        narrow = [index for index, value in enumerate(model.graph.outputs) if value.dtype == _HALF and value.producer()]
        for graph in graphs_of(model):
            _widen_nodes(graph)
            if graph is not model.graph:
                for value in graph.inputs:
                    _widen_type(value)
        for graph in graphs_of(model):
            places = _places(graph)
            given = model.graph.inputs if graph is model.graph else ()
            for value in [*graph.initializers.values(), *given]:
                if value.dtype == _HALF or (value.const_value is not None and value.const_value.dtype == _HALF):
                    _cast_behind(model, graph, value, places, names)
        for index in narrow:
            _narrow_output(model.graph, index, names)


def holds_half(model: ir.Model) -> bool:
    """Whether anything in the model is FP16."""
    return any(
        value.dtype == _HALF
        for graph in graphs_of(model)
        for value in (*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs))
    )


def _widen_nodes(graph: ir.Graph) -> None:
    """Types of everything that nodes make, and of what they are told to make."""
    for node in graph:
        for value in node.outputs:
            _widen_type(value)
        for name, attribute in list(node.attributes.items()):
            if name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.as_int() == _HALF:
                node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _HALF:
                wide = ir.tensor(attribute.as_tensor().numpy().astype("float32"), dtype=_FLOAT)
                node.attributes[name] = ir.AttrTensor(name, wide)


def _widen_type(value: ir.Value) -> None:
    if value.dtype == _HALF:
        value.dtype = _FLOAT


def _cast_behind(model: ir.Model, graph: ir.Graph, value: ir.Value, places: _Places, names: FreshNames) -> None:
    """Let everything that reads `value` read a Cast of it instead.

    The Cast stands in front of the first reader, so that a segment of the graph holds its own weights and no others.
    """
    uses = list(value.uses())
    wide = ir.node("Cast", [value], {"to": int(_FLOAT)}, name=f"{value.name}.widen")
    result = wide.outputs[0]
    result.name, result.shape, result.dtype = names.make(f"{value.name}.wide"), value.shape, _FLOAT
    for use in uses:
        use.node.replace_input_with(use.idx, result)
    for body in graphs_of(model):
        if body is not model.graph:
            for index, output in enumerate(body.outputs):
                if output is value:
                    body.outputs[index] = result
    readers = [places[use.node] for use in uses if use.node in places]
    if readers:
        graph.insert_before(min(readers, key=lambda place: place[0])[1], wide)
    else:
        graph.append(wide)


_Places = dict[ir.Node, tuple[int, ir.Node]]
"""Every node of a graph and of its subgraphs -> the node of the graph itself that it belongs to, and its position."""


def _places(graph: ir.Graph) -> _Places:
    places: _Places = {}
    for at, node in enumerate(graph):
        places[node] = at, node
        for body in bodies_of(node):
            places.update(dict.fromkeys(ir.traversal.RecursiveGraphIterator(body), (at, node)))
    return places


def _narrow_output(graph: ir.Graph, index: int, names: FreshNames) -> None:
    """The model's own output is FP16 again, under its own name."""
    value = graph.outputs[index]
    name = value.name
    value.name = names.make(f"{name}.wide")
    narrow = ir.node("Cast", [value], {"to": int(_HALF)}, name=f"{name}.narrow")
    result = narrow.outputs[0]
    result.name, result.shape, result.dtype = name, value.shape, _HALF
    graph.append(narrow)
    graph.outputs[index] = result
