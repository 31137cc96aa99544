"""FP32 models on runtimes that compute in FP16: what 16 bits hold is narrowed, everything else stays as it is.

A value stays FP32 when a run would notice that it has no more than FP16's 11 digits and 40 powers of two:

    largest   beyond 65504 / HEADROOM in calibration, a mask, or never seen there
    smallest  all of it so small that FP16 has lost digits, as the epsilon of a normalization is
    divisor   it becomes one: of a variance near zero FP16 makes zero, and infinity of what it divides

An operator stays FP32 when it reads or makes such a value, when it adds up in between more than FP16 holds (a mean of
thousands, a sum of squares), when the standard has no FP16 form of it, and inside subgraphs. So does one that would
save nothing, because all around it is FP32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from compile.calibrate.collectors import Range, Unfit
from compile.graph import STORAGE, FreshNames, bodies_of, constant, dims_of, graphs_of, ir
from compile.passes.base import Pass

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_normal)
"""Below it FP16 has fewer digits, and below 2^-25 it has zero."""
HEADROOM = 4
"""Calibration has seen a few samples; others may be larger by so much."""

# Operators that cost enough for FP16 to pay; the others follow those around them.
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN"})
# They add up before they divide.
_MEANS = frozenset({"ReduceMean", "GlobalAveragePool", "AveragePool"})
# They add up squares or powers of e, which no range of what goes in and out shows.
_SQUARES = frozenset({
    "GlobalLpPool", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "LpPool",
    "LRN", "MeanVarianceNormalization", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
    "RMSNormalization",
})  # fmt: skip
# Their scales are of calibration, and FP16 would change what codes mean.
_CODES = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
# What hands a divisor on: it is as small in front of them as behind.
_HANDING_ON = frozenset({
    "Abs", "Add", "Cast", "Clip", "Expand", "Identity", "Max", "ReduceMax", "ReduceMean", "ReduceSum", "Reshape",
    "Sqrt", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
# Elements of a weight that are looked at together.
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class NarrowFloats(Pass):
    """Compute in FP16 what FP16 holds, with a Cast wherever the width changes.

    `ranges` are those that `wanted` asks for, by name. Inputs and outputs of the model keep their types. Weights are
    rounded when they are written. Says which operators with weights or products stay FP32, and why.
    """

    ranges: Mapping[str, Range | Unfit]
    requires: ClassVar = ("no_functions", "no_constant_nodes", "sorted", "unique_names")
    ensures: ClassVar = ("no_functions", "no_constant_nodes", "sorted", "unique_names")

    def apply(self, model: ir.Model) -> list[str]:
        left = stays_wide(model, self.ranges)
        _Narrower(model, [node for node in model.graph if node not in left]).narrow()
        return [
            f"{node.op_type} {node.name!r} stays FP32: {reason}"
            for node, reason in left.items()
            if node.op_type in _PRODUCTS and _floats(node)
        ]


def wanted(model: ir.Model) -> list[str]:
    """Names of the values whose ranges are needed: all floats that the main graph is given or makes."""
    made = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    return [value.name or "" for value in made if value.dtype == _FLOAT and (value.uses() or value.is_graph_output())]


def stays_wide(model: ir.Model, ranges: Mapping[str, Range | Unfit]) -> dict[ir.Node, str]:
    """Nodes of the main graph that compute in FP32, with the reason."""
    wide = _WideValues(ranges)
    wide.find_divisors(model.graph)
    opset = model.graph.opset_imports.get("", 1)
    left = {}
    for node in model.graph:
        reason = _unable(node, opset) or wide.reason(node) or _overflows_within(node, wide)
        if reason:
            left[node] = reason
    _leave_islands(model.graph, left)
    return left


# --- values


class _WideValues:
    """Why a value cannot be FP16."""

    def __init__(self, ranges: Mapping[str, Range | Unfit]) -> None:
        self._ranges = ranges
        self._divisors: set[ir.Value] = set()
        self._constants: dict[ir.Value, str] = {}

    def find_divisors(self, graph: ir.Graph) -> None:
        """Follow what is divided by, back to where it comes from."""
        found = [value for node in graph for value in _divisors_of(node)]
        while found:
            value = found.pop()
            if value in self._divisors or constant(value) is not None:
                continue
            self._divisors.add(value)
            producer = value.producer()
            if producer is not None and producer.op_type in _HANDING_ON:
                found += _floats(producer, outputs=False)

    def reason(self, node: ir.Node) -> str:
        """Why a node cannot be FP16, of all it reads and makes; empty where nothing speaks against it."""
        return next((why for value in _floats(node) if (why := self._of(value))), "")

    def _of(self, value: ir.Value) -> str:
        tensor = constant(value)
        if tensor is not None:
            if value not in self._constants:
                self._constants[value] = _unfit_constant(value.name or "", tensor)
            return self._constants[value]
        if value in self._divisors:
            return f"{value.name!r} becomes a divisor"
        largest = self.largest(value)
        if largest is None:
            found = self._ranges.get(value.name or "")
            return f"{value.name!r}: {found.reason if isinstance(found, Unfit) else 'not seen in calibration'}"
        if largest * HEADROOM > LARGEST:
            return f"{value.name!r} reaches {largest:.3g}; FP16 ends at {LARGEST:g}"
        return f"{value.name!r} is {largest:.3g} at most" if 0 < largest < SMALLEST else ""

    def largest(self, value: ir.Value) -> float | None:
        """The largest magnitude in calibration; None where that says nothing."""
        found = self._ranges.get(value.name or "")
        return max(-found.low, found.high) if isinstance(found, Range) else None


def _divisors_of(node: ir.Node) -> list[ir.Value]:
    """What the node divides by, or takes the logarithm or a root of."""
    op, inputs = node.op_type, node.inputs
    if op == "Div" and inputs[1] is not None and inputs[1].dtype == _FLOAT:
        return [inputs[1]]
    if op in ("Reciprocal", "Log") and inputs[0] is not None and inputs[0].dtype == _FLOAT:
        return [inputs[0]]
    if op == "Pow" and inputs[0] is not None and inputs[0].dtype == _FLOAT:
        exponent = constant(inputs[1])
        if exponent is None or not _are_counts(exponent.numpy()):
            return [inputs[0]]
    return []


def _are_counts(exponents: npt.NDArray[Any]) -> bool:
    return bool(((exponents >= 0) & (exponents == np.rint(exponents))).all())


def _unfit_constant(name: str, tensor: ir.TensorProtocol) -> str:
    """Why FP16 does not hold a weight. It is looked at piece by piece; infinities are as legal in FP16."""
    largest, flat = 0.0, tensor.numpy().reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = np.abs(flat[start : start + _PIECE])
        if np.isnan(piece).any():
            return f"weight {name!r} holds NaN"
        largest = max(largest, float(np.max(piece, where=np.isfinite(piece), initial=0.0)))
    if largest > LARGEST:
        return f"weight {name!r} reaches {largest:.3g}; FP16 ends at {LARGEST:g}"
    return f"weight {name!r} is {largest:.3g} at most" if 0 < largest < SMALLEST else ""


# --- operators


def _floats(node: ir.Node, outputs: bool = True) -> list[ir.Value]:
    """The FP32 values that it reads and makes, of those places that may be FP16."""
    places = [*node.inputs, *(node.outputs if outputs else ())]
    return [value for value in places if value is not None and value.dtype == _FLOAT]


def _unable(node: ir.Node, opset: int) -> str:
    """Why the operator has no FP16 form."""
    if next(bodies_of(node), None) is not None:
        return "it has a body"
    if any(value is not None and value.dtype is None for value in (*node.inputs, *node.outputs)):
        return "types around it are unknown"
    if node.op_type in _CODES:
        return "its scales stay FP32"
    forms = _forms(node.op_type, node.domain, opset)
    if forms is None:
        return "no standard operator"
    places = _narrow_places(node, opset)
    makes = [value for value in node.outputs if value.dtype == _FLOAT]
    if not any(places) or (makes and not places[1]):
        return "the standard has no FP16 form of it"
    # What it makes follows from an attribute, which only Cast's pass here would follow.
    return "" if places[0] or node.op_type == "Cast" else "it makes FP32 from no FP32"


def _overflows_within(node: ir.Node, wide: _WideValues) -> str:
    if node.op_type in _SQUARES:
        return "it adds up squares or exponentials"
    if node.op_type not in _MEANS:
        return ""
    taken, made = node.inputs[0], node.outputs[0]
    count = _elements(taken) / max(_elements(made), 1)
    largest = (wide.largest(taken) if taken is not None else None) or 0.0
    if math.isfinite(count) and largest * count * HEADROOM <= LARGEST:
        return ""
    return f"it adds up {count:.0f} values of up to {largest:.3g}" if math.isfinite(count) else "it adds up any number"


def _elements(value: ir.Value | None) -> float:
    """How many there are; infinity where a request decides."""
    if value is None or value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return math.inf
    return math.prod(dim for dim in value.shape if isinstance(dim, int))


_Places = tuple[list[int], list[int]]
"""Positions among inputs, and among outputs."""


def _narrow_places(node: ir.Node, opset: int) -> _Places:
    """Where the node reads and makes FP32 that may as well be FP16."""
    forms = _forms(node.op_type, node.domain, opset)
    if forms is None:
        return [], []
    taken, made = forms
    return _floats_at(node.inputs, taken), _floats_at(node.outputs, made)


def _floats_at(values: Sequence[ir.Value | None], may: Sequence[bool]) -> list[int]:
    """The last formal of a variadic operator stands for all that follow."""
    return [
        at
        for at, value in enumerate(values)
        if value is not None and value.dtype == _FLOAT and may[min(at, len(may) - 1)]
    ]


@functools.lru_cache(maxsize=1024)
def _forms(op: str, domain: str, opset: int) -> tuple[Sequence[bool], Sequence[bool]] | None:
    """Whether each formal input and output may be FP16, by the operator's schema; None where there is no schema."""
    if domain not in ("", "ai.onnx"):
        return None
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None
    types = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}

    def may(formals: Iterable[onnx.defs.OpSchema.FormalParameter]) -> list[bool]:
        return ["tensor(float16)" in types.get(each.type_str, ()) for each in formals] or [False]

    return may(schema.inputs), may(schema.outputs)


def _leave_islands(graph: ir.Graph, left: dict[ir.Node, str]) -> None:
    """Operators that cost little and have FP32 on all sides: narrowing them would add Casts and save nothing."""
    nodes = [node for node in graph if node.op_type not in _PRODUCTS]
    while True:
        found = [node for node in nodes if node not in left and all(each in left for each in _around(node))]
        if not found:
            return
        left |= dict.fromkeys(found, "all around it is FP32")


def _around(node: ir.Node) -> list[ir.Node]:
    """The nodes of the same graph that make and read its floats."""
    makers = [value.producer() for value in _floats(node, outputs=False)]
    readers = [use.node for value in node.outputs if value.dtype == _FLOAT for use in value.uses()]
    return [each for each in (*makers, *readers) if each is not None and each.graph is node.graph]


# --- the graph


class _Narrower:
    """Narrows these nodes of a graph, and puts Casts where the width changes."""

    def __init__(self, model: ir.Model, nodes: list[ir.Node]) -> None:
        self._model, self._nodes = model, nodes
        self._opset = model.graph.opset_imports.get("", 1)
        self._names = FreshNames(model)
        self._halves: dict[ir.Value, ir.Value] = {}

    def narrow(self) -> None:
        graph = self._model.graph
        places = {node: _narrow_places(node, self._opset) for node in self._nodes}
        for node in self._nodes:
            for at in places[node][0]:
                node.replace_input_with(at, self._half_of(node.inputs[at]))
            for at in places[node][1]:
                self._narrow_output(node, at)
            if node.op_type == "Cast" and places[node][1]:
                node.attributes["to"] = ir.AttrInt64("to", int(_HALF))
        # A weight that is read in FP16 alone is not kept in FP32 as well.
        for value in self._halves:
            if constant(value) is not None and not value.uses() and not value.is_graph_output():
                del graph.initializers[value.name or ""]

    def _half_of(self, value: ir.Value | None) -> ir.Value:
        if value is None:
            raise ValueError("a place without a value was to be narrowed")
        if value not in self._halves:
            tensor = constant(value)
            self._halves[value] = self._cast(value) if tensor is None else self._weight(value, tensor)
        return self._halves[value]

    def _narrow_output(self, node: ir.Node, at: int) -> None:
        """The node makes FP16 under a name of its own; a Cast behind it makes what went by the old one."""
        wide = node.outputs[at]
        name, uses, was_output = wide.name, list(wide.uses()), wide.is_graph_output()
        wide.name = self._names.make(f"{name}.float16")
        wide.dtype = _HALF
        back = ir.node("Cast", [wide], {"to": int(_FLOAT)}, name=f"{name}.widen")
        result = back.outputs[0]
        result.name, result.shape, result.dtype = name, wide.shape, _FLOAT
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        if was_output:
            for graph in graphs_of(self._model):
                for index, output in enumerate(graph.outputs):
                    if output is wide:
                        graph.outputs[index] = result
        self._model.graph.insert_after(node, back)
        self._halves[result] = wide

    def _cast(self, value: ir.Value) -> ir.Value:
        """A Cast to FP16 right behind what makes the value."""
        graph = self._model.graph
        node = ir.node("Cast", [value], {"to": int(_HALF)}, name=f"{value.name}.narrow")
        result = node.outputs[0]
        result.name, result.shape, result.dtype = self._names.make(f"{value.name}.float16"), value.shape, _HALF
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph[0], node)
        else:
            graph.insert_after(producer, node)
        return result

    def _weight(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        name = self._names.make(f"{value.name}.float16")
        shape = ir.Shape(dims_of(tensor))
        half = ir.LazyTensor(
            lambda: ir.tensor(tensor.numpy().astype(np.float16), dtype=_HALF, name=name),
            dtype=_HALF,
            shape=shape,
            name=name,
            metadata_props={STORAGE: f"{value.name}.float16"},
        )
        result = ir.Value(name=name, shape=shape, type=ir.TensorType(_HALF), const_value=half)
        self._model.graph.register_initializer(result)
        return result
