"""Passes that bring every exporter's graph into one form."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import onnx
from onnx_ir.passes import PassError, Sequential, common
from onnxscript.version_converter import ConvertVersionPass

from compile.errors import ModelError
from compile.graph import FreshNames, constant, graphs_of, ir, nodes_of
from compile.host import give_back
from compile.passes.base import Pass
from compile.passes.sequences import sequences


@dataclasses.dataclass(frozen=True)
class InlineFunctions(Pass):
    """Replace calls of model-local functions by their bodies."""

    ensures: ClassVar = ("no_functions",)

    def apply(self, model: ir.Model) -> None:
        try:
            Sequential(common.InlinePass(), common.RemoveUnusedFunctionsPass())(model)  # type: ignore[no-untyped-call]
        except PassError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ModelError(f"the model's functions cannot be inlined: {reason}", "export the model again") from None


@dataclasses.dataclass(frozen=True)
class LiftIrVersion(Pass):
    """Raise the IR version to at least `minimum`, and make every weight a constant.

    Before IR version 4 each weight is an input too; from then on an input with a value is a default that the caller
    may override, which a bundle does not offer.
    """

    minimum: int = 8

    def apply(self, model: ir.Model) -> Sequence[str]:
        defaults = (
            [v.name for v in model.graph.inputs if v.is_initializer()] if model.ir_version >= _DEFAULTS_IR else []
        )
        common.RemoveInitializersFromInputsPass()(model)
        model.ir_version = max(model.ir_version, self.minimum)
        if not defaults:
            return ()
        return [f"inputs with a default are compiled as constants: {_few(defaults)}"]


# Since this version an initializer need not be an input, so that being one means something.
_DEFAULTS_IR = 4


def _few(names: Sequence[object]) -> str:
    """A readable part of a list."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclasses.dataclass(frozen=True)
class LiftConstants(Pass):
    """Make Constant nodes initializers, of every size: some exporters keep all their weights in them."""

    requires: ClassVar = ("no_functions",)
    ensures: ClassVar = ("no_constant_nodes",)

    def apply(self, model: ir.Model) -> None:
        names = FreshNames(model)
        for node in list(nodes_of(model)):
            if node.op_type == "Constant" and node.domain == "" and node.outputs[0].is_graph_output():
                _free_from_output(node.outputs[0], node.graph, names)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        for graph in model.graphs():
            for value in list(graph.initializers.values()):
                if graph is not model.graph and value.is_graph_output():
                    _free_from_output(value, graph, names)
        # Weights of a subgraph go to the main graph, where they are written as external data like all others.
        common.LiftSubgraphInitializersToMainGraphPass()(model)


def _free_from_output(value: ir.Value, graph: ir.Graph | ir.Function | None, names: FreshNames) -> None:
    """Put an Identity between a constant and the graph output that it is, so that the constant can move."""
    if graph is None:
        raise ValueError(f"{value.name!r} belongs to no graph")
    copy = ir.node("Identity", [None])
    result = copy.outputs[0]
    result.type, result.shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    result.name, value.name = value.name, names.make(f"{value.name}.constant")
    copy.replace_input_with(0, value)
    graph.append(copy)


@dataclasses.dataclass(frozen=True)
class InferShapes(Pass):
    """ONNX shape inference; large weights are kept out, since over 2 GB it returns an empty graph.

    Shapes are inferred anew: the exporter's names are older than the ranges bound since, and some say what is not so,
    which a runtime only notices where a segment takes the value as its input. What inference cannot find out stays as
    the exporter said. Of a graph that is as the pass left it, nothing more is found out.
    """

    def apply(self, model: ir.Model) -> Sequence[str]:
        if model.meta.get(_INFERRED) == _structure(model):
            return ()
        notes = self._infer(model)
        # What is found out inside of bodies may say more of the nodes that they belong to.
        model.meta[_INFERRED] = _structure(model) if len(graphs_of(model)) == 1 else None
        return notes

    def _infer(self, model: ir.Model) -> Sequence[str]:
        declared = {v: v.shape for node in model.graph for v in node.outputs if v.shape is not None}
        untyped = {value for node in nodes_of(model) for value in node.outputs if value.type is None}
        for value in declared:
            value.shape = None
        _infer_graph(model)
        _infer_bodies(model)
        give_back()
        _check_inferred(model)
        symbols = {str(dim) for value in model.graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
        wrong: list[str] = []
        for value, shape in declared.items():
            if value.shape is None:
                value.shape = shape
            elif len(shape) != len(value.shape) or any(
                isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, value.shape, strict=True)
            ):
                wrong.append(f"{value.name!r} is {_shown(value.shape)}, not {_shown(shape)}")
            elif value.is_graph_output() and shape.is_static():
                known = [
                    b if isinstance(b, int) or str(b) in symbols else a for a, b in zip(shape, value.shape, strict=True)
                ]
                value.shape = ir.Shape(known)
        for value in sequences(model) & untyped:
            value.type = value.shape = None
        if not wrong:
            return ()
        more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
        return [f"the model states shapes that do not follow from its inputs: {'; '.join(wrong[:2])}{more}"]


_INFERRED = "tightfit.inferred"
"""Key of what `InferShapes` left, in the metadata of passes, which are not written."""


def _structure(model: ir.Model) -> list[object]:
    """What shapes follow from, and those that were found: equal where no pass has changed anything since."""

    def described(values: Iterable[ir.Value]) -> list[object]:
        return [(value.name, value.dtype, None if value.shape is None else tuple(value.shape)) for value in values]

    return described(model.graph.inputs) + [
        (
            node.domain,
            node.op_type,
            [value.name if value is not None else None for value in node.inputs],
            list(node.attributes.values()),
            described(node.outputs),
        )
        for node in model.graph
    ]


# Beyond this, products of sizes overflow in what computes with them.
_MOST_ELEMENTS = 1 << 59
# A vector of so many elements is no shape.
_LONG_VECTOR = 1 << 16


def _infer_graph(model: ir.Model) -> None:
    """Infer with the values of computed shapes, unless a long vector is cast: inference takes the vector for a shape,
    and makes one of as many dimensions, each of 50 bytes and more."""
    casts = [node.inputs[0] for node in nodes_of(model) if node.op_type in ("Cast", "CastLike")]
    if casts:
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    shapes = [value.shape for value in casts if value is not None and value.shape is not None]
    if not any(len(shape) == 1 and isinstance(shape[0], int) and shape[0] > _LONG_VECTOR for shape in shapes):
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)


def _check_inferred(model: ir.Model) -> None:
    """No operator, with the attributes and inputs that it has, makes what cannot be."""
    for node in nodes_of(model):
        for value in node.outputs:
            if value.dtype == ir.DataType.UNDEFINED:
                raise ModelError(
                    f"{node.op_type} node {node.name!r} makes {value.name!r} of no element type",
                    "export the model again",
                )
            if value.shape is None:
                continue
            sizes = [dim for dim in value.shape if isinstance(dim, int)]
            if math.prod(max(dim, 1) for dim in sizes) > _MOST_ELEMENTS:
                raise ModelError(
                    f"{node.op_type} node {node.name!r} makes {value.name!r} of shape {_shown(value.shape)}, "
                    "more than any memory could hold",
                    "use smaller shapes, or export the model again",
                )
            if any(dim < 0 for dim in sizes):
                if node.graph is not model.graph:
                    # The branch that these inputs do not take may be wrong for them.
                    value.shape = None
                    continue
                raise ModelError(
                    f"{node.op_type} node {node.name!r} makes {value.name!r} of shape {_shown(value.shape)}",
                    "its inputs are too small for its attributes: use larger shapes, or export the model again",
                )


# Tensors of at most so many elements are shapes, counts and factors, which inference looks into.
_SHAPE_ELEMENTS = 64


def _infer_bodies(model: ir.Model) -> None:
    """Complete the shapes inside of subgraphs, where ONNX does not see constants of the graphs around."""
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    for graph in graphs_of(model):
        for node in graph if graph is not model.graph else ():
            if any(value.shape is None or not value.shape.is_static() for value in node.outputs):
                _infer_node(node, opsets, model.ir_version)


def _infer_node(node: ir.Node, opsets: list[onnx.OperatorSetIdProto], ir_version: int) -> None:
    opset = next((each.version for each in opsets if each.domain == node.domain), 1)
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or not value.name:
            continue
        if value.dtype is None:
            return
        dims = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        types[value.name] = onnx.helper.make_tensor_type_proto(value.dtype, dims)
        tensor = constant(value)
        if tensor is not None and tensor.size <= _SHAPE_ELEMENTS:
            data[value.name] = ir.serde.serialize_tensor(tensor)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        found = onnx.shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data, opset_imports=opsets, ir_version=ir_version
        )
    except (
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
    ):
        return
    for value in node.outputs:
        made = found.get(value.name or "")
        shape = ir.serde.deserialize_type_proto_for_shape(made) if made is not None else None
        if shape is not None and shape.is_static():
            value.shape = shape


def _shown(shape: ir.Shape) -> str:
    return f"[{','.join(str(dim) for dim in shape)}]"


@dataclasses.dataclass(frozen=True)
class AlignBroadcasts(Pass):
    """Before opset 7 a second operand was aligned by the attributes `broadcast` and `axis`: give it its trailing axes.

    ONNX's own converter aligns operands of more than one axis, or in front of more than one, with the wrong axes.
    """

    requires: ClassVar = ("no_functions",)

    def apply(self, model: ir.Model) -> None:
        opset = model.graph.opset_imports.get("", 1)
        nodes = (
            [n for n in nodes_of(model) if "broadcast" in n.attributes and n.op_type in _ALIGNED] if opset < 7 else []
        )
        if nodes:
            common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
        names = FreshNames(model)
        for node in nodes:
            broadcast, axis = node.attributes.pop("broadcast").as_int(), node.attributes.pop("axis", None)
            if not broadcast or axis is None:
                continue
            left, right = node.inputs[0], node.inputs[1]
            if left is None or right is None or left.shape is None or right.shape is None or node.graph is None:
                raise ModelError(
                    f"{node.op_type} node {node.name!r} of opset {opset} broadcasts operands of unknown rank",
                    "export the model with opset_version=7 or higher",
                )
            rank = len(right.shape)
            behind = len(left.shape) - axis.as_int() % max(len(left.shape), 1) - rank
            if behind > 0:
                aligned = ir.node("Unsqueeze", [right], {"axes": list(range(rank, rank + behind))})
                aligned.outputs[0].name = names.make(f"{right.name}.aligned")
                aligned.outputs[0].type = right.type
                aligned.outputs[0].shape = ir.Shape([*right.shape, *[1] * behind])
                node.graph.insert_before(node, aligned)
                node.replace_input_with(1, aligned.outputs[0])


_ALIGNED = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less")


@dataclasses.dataclass(frozen=True)
class LiftOpset(Pass):
    """Raise the ONNX opset to at least `minimum`, where a runtime or a lowering needs an operator's newer form.

    A model of other operators alone need not import it; what passes add to it are ONNX's.
    """

    minimum: int

    requires: ClassVar = ("no_functions", "no_constant_nodes")
    ensures: ClassVar = ("no_functions", "no_constant_nodes")

    def apply(self, model: ir.Model) -> Sequence[str]:
        have = model.graph.opset_imports.setdefault("", self.minimum)
        if have >= self.minimum:
            return ()
        hint = f"export the model with opset_version={self.minimum} or higher"
        try:
            ConvertVersionPass(target_version=self.minimum, fallback=True)(model)
        except (PassError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"cannot raise opset {have} to {self.minimum}: {reason}", hint) from None
        if model.graph.opset_imports.get("", 0) < self.minimum:
            # The converter logs why, and leaves the model as it is.
            raise ModelError(f"cannot raise opset {have} to {self.minimum}: ONNX's converter refuses the model", hint)
        model.opset_imports.update(model.graph.opset_imports)
        # What an old operator had as attributes, its newer form takes as constants.
        LiftConstants().apply(model)
        return [f"the model was raised from opset {have} to {self.minimum}"]


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

    def apply(self, model: ir.Model) -> Sequence[str]:
        counts = collections.Counter((g, node.name) for g in graphs_of(model) for node in g if node.name)
        shared = [f"{count} nodes named {name!r}" for (_, name), count in counts.items() if count > 1]
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
        return [f"names must differ, so these were renamed: {'; '.join(shared[:3])}"] if shared else ()


@dataclasses.dataclass(frozen=True)
class SortNodes(Pass):
    """Order nodes so that each stands behind what it reads."""

    ensures: ClassVar = ("sorted",)

    def apply(self, model: ir.Model) -> None:
        try:
            common.TopologicalSortPass()(model)
        except (PassError, ValueError) as error:
            raise ModelError(f"the graph has a cycle: {error}", "export the model again") from None
