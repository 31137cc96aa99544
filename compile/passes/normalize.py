"""Passes that bring every exporter's graph into one form."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from onnx_ir.passes import PassError, Sequential, common
from onnxscript.version_converter import ConvertVersionPass

from compile.errors import ModelError
from compile.graph import ir, nodes_of
from compile.host import give_back
from compile.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class InlineFunctions(Pass):
    """Replace calls of model-local functions by their bodies."""

    ensures: ClassVar = ("no_functions",)

    def apply(self, model: ir.Model) -> None:
        Sequential(common.InlinePass(), common.RemoveUnusedFunctionsPass())(model)  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class LiftConstants(Pass):
    """Make Constant nodes initializers, of every size: some exporters keep all their weights in them."""

    requires: ClassVar = ("no_functions",)
    ensures: ClassVar = ("no_constant_nodes",)

    def apply(self, model: ir.Model) -> None:
        for node in list(nodes_of(model)):
            if node.op_type == "Constant" and node.domain == "" and node.outputs[0].is_graph_output():
                _free_from_output(node.outputs[0], node.graph)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        for graph in model.graphs():
            for value in list(graph.initializers.values()):
                if graph is not model.graph and value.is_graph_output():
                    _free_from_output(value, graph)
        # Weights of a subgraph go to the main graph, where they are written as external data like all others.
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        # IR versions below 4 list weights among the inputs, where a caller could override them.
        common.RemoveInitializersFromInputsPass()(model)


def _free_from_output(value: ir.Value, graph: ir.Graph | ir.Function | None) -> None:
    """Put an Identity between a constant and the graph output that it is, so that the constant can move."""
    if graph is None:
        raise ValueError(f"{value.name!r} belongs to no graph")
    copy = ir.node("Identity", [None])
    result = copy.outputs[0]
    result.type, result.shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    result.name, value.name = value.name, f"{value.name}.constant"
    copy.replace_input_with(0, value)
    graph.append(copy)


@dataclasses.dataclass(frozen=True)
class InferShapes(Pass):
    """ONNX shape inference; large weights are kept out, since over 2 GB it returns an empty graph.

    Shapes are inferred anew, but for fixed outputs: the exporter's names are older than the ranges bound since, and
    some say what is not so, which a runtime only notices where a segment takes the value as its input.
    """

    def apply(self, model: ir.Model) -> None:
        stale = {
            value: value.shape
            for node in model.graph
            for value in node.outputs
            if value.shape is not None and not (value.shape.is_static() and value.is_graph_output())
        }
        for value in stale:
            value.shape = None
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        give_back()
        for value, shape in stale.items():
            if value.shape is None:
                value.shape = shape


@dataclasses.dataclass(frozen=True)
class LiftOpset(Pass):
    """Raise the ONNX opset to at least `minimum`, where a lowering needs an operator's newer form."""

    minimum: int

    def apply(self, model: ir.Model) -> None:
        have = model.graph.opset_imports.get("")
        if have is None or have >= self.minimum:
            return
        try:
            ConvertVersionPass(target_version=self.minimum, fallback=True)(model)
        except (PassError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"cannot raise opset {have} to {self.minimum}: {reason}", "use --scheme fp32") from None
        model.opset_imports.update(model.graph.opset_imports)


@dataclasses.dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Drop Identity nodes, nodes whose results nobody reads, unused weights and unused opset imports."""

    def apply(self, model: ir.Model) -> None:
        for node in list(nodes_of(model)):
            if node.op_type == "Identity" and node.domain == "":
                _drop_identity(node)
        Sequential(common.RemoveUnusedNodesPass(), common.RemoveUnusedOpsetsPass())(model)


def _drop_identity(node: ir.Node) -> None:
    source, copy, graph = node.inputs[0], node.outputs[0], node.graph
    if source is None or graph is None:
        return
    if copy.is_graph_output():
        # An output needs a producer in its own graph, and one that is not another output already.
        producer = source.producer()
        if producer is None or producer.graph is not graph or source.is_graph_output():
            return
    if source.type is None:
        source.type = copy.type
    if source.shape is None:
        source.shape = copy.shape
    takes_name = copy.is_graph_output()
    ir.convenience.replace_all_uses_with(copy, source, replace_graph_outputs=True)
    if takes_name:
        source.name = copy.name
    graph.remove(node, safe=True)


@dataclasses.dataclass(frozen=True)
class FixNames(Pass):
    """Give every node and value a name of its own, across all subgraphs; inputs and outputs keep theirs."""

    ensures: ClassVar = ("unique_names",)

    def apply(self, model: ir.Model) -> None:
        common.NameFixPass()(model)
        # That pass works by scope: two branches may still use one name.
        top = model.graph
        owner = {v.name: v for v in (*top.inputs, *top.initializers.values(), *top.outputs)}
        inner = (v for graph in model.graphs() if graph is not top for v in graph.inputs)
        for value in (*inner, *(v for node in nodes_of(model) for v in node.outputs)):
            name, count = value.name, 0
            while value.name and owner.setdefault(value.name, value) is not value:
                count += 1
                value.name = f"{name}_{count}"


@dataclasses.dataclass(frozen=True)
class SortNodes(Pass):
    """Order nodes so that each stands behind what it reads."""

    ensures: ClassVar = ("sorted",)

    def apply(self, model: ir.Model) -> None:
        try:
            common.TopologicalSortPass()(model)
        except (PassError, ValueError) as error:
            raise ModelError(f"the graph has a cycle: {error}", "export the model again") from None
