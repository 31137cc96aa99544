"""Pieces that the lowerings for onnxruntime share: looking at nodes, and making constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from compile.graph import STORAGE, FreshNames, constant, dims_of, ir

CONTRIB = "com.microsoft"
# Tables and matrices below this many elements save nothing: scales and a kernel call cost more.
MIN_ELEMENTS = 1024


class Leave(Exception):  # noqa: N818 - not an error: the reason why an operator stays as it is
    def __init__(self, reason: str) -> None:
        self.reason = reason


def is_op(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is one of these standard operators."""
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def ints(node: ir.Node, name: str) -> list[int]:
    """An attribute of integers; empty where it is not given."""
    return [int(item) for item in attribute(node, name, ())]


def behind_cast(value: ir.Value | None) -> ir.Value | None:
    """The FP16 weight that a Cast widens, else the value itself."""
    producer = _producer(value)
    if producer is None or producer.op_type != "Cast" or value is None or value.dtype != ir.DataType.FLOAT:
        return value
    tensor = constant(producer.inputs[0])
    return producer.inputs[0] if tensor is not None and tensor.dtype == ir.DataType.FLOAT16 else value


# What hands a weight on with every value it has.
_HANDING_ON = ("Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")


def require_float(tensor: ir.TensorProtocol) -> None:
    """Raise Leave where a weight is of a type that nothing is quantized from."""
    if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Leave(f"weight is {tensor.dtype.name}, not FLOAT or FLOAT16")


def not_constant(node: ir.Node, at: int) -> Leave:
    """Why the weight that stands at this input of a node cannot be taken: it is no constant."""
    producer = _producer(node.inputs[at])
    while producer is not None and is_op(producer, *_HANDING_ON):
        tensor = constant(producer.inputs[0])
        if tensor is not None:
            require_float(tensor)
            return Leave(f"the weight stands behind a {producer.op_type}")
        producer = _producer(producer.inputs[0])
    if producer is not None and is_op(producer, "DequantizeLinear"):
        return Leave("quantized in the source already")
    if not is_op(node, "MatMul", "Gemm"):
        return Leave(f"the {'table' if is_op(node, 'Gather') else 'kernel'} is computed")
    left = constant(behind_cast(node.inputs[0]))
    return Leave("both sides are computed" if left is None else "the weight is the left side")


def _producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None else None


def graph_of(node: ir.Node) -> ir.Graph | ir.Function:
    if node.graph is None:
        raise ValueError(f"node {node.name!r} was already replaced")
    return node.graph


def sole_reader(value: ir.Value) -> ir.Node | None:
    """The node that alone reads the value, once, in its own graph; None where that is not so, or it is an output."""
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or uses[0].node.graph is not value.graph:
        return None
    return uses[0].node


def scalar(value: ir.Value | None) -> float | None:
    """The finite number that a constant of one float32 element holds; None for any other value."""
    tensor = constant(value)
    if tensor is None or tensor.size != 1 or tensor.dtype != ir.DataType.FLOAT:
        return None
    number = float(tensor.numpy().reshape(-1)[0])
    return number if math.isfinite(number) else None


def take_over(old: ir.Node, new: list[ir.Node], result: ir.Value) -> None:
    """Put `new` in the place of `old`; `result` takes over the name, type and uses of its one output."""
    before = old.outputs[0]
    result.name, result.type, result.shape = before.name, before.type, before.shape
    ir.convenience.replace_nodes_and_values(graph_of(old), old, [old], new, [before], [result])


class Constants:
    """Initializers that a lowering adds to the main graph, under names that the model has not."""

    def __init__(self, model: ir.Model) -> None:
        self.names = FreshNames(model)
        self._model = model

    def add(self, name: str, array: Any) -> ir.Value:
        """One whose value is known."""
        return self._register(self.names.make(name), ir.tensor(np.asarray(array)))

    def add_lazy(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], compute: Callable[[], Any], storage: str = ""
    ) -> ir.Value:
        """One whose bytes are computed when they are read. Those with equal `storage` have equal bytes."""
        name = self.names.make(name)
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(compute()).reshape(shape), dtype=dtype, name=name),
            dtype=dtype,
            shape=ir.Shape(shape),
            name=name,
            metadata_props={STORAGE: storage} if storage else None,
        )
        return self._register(name, tensor)

    def _register(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name
        shape = ir.Shape(dims_of(tensor))
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._model.graph.register_initializer(value)
        return value
