"""Which operators compute on codes, under a scheme with calibrated activations.

A convolution always does: its kernel is what the scheme is for. An operator between two convolutions does where its
inputs are codes already and somebody behind it wants codes; it never has codes made for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from compile.backends.ort_rewrite import (
    MIN_ELEMENTS,
    Leave,
    attribute,
    behind_cast,
    ints,
    is_op,
    not_constant,
    require_float,
    scalar,
    sole_reader,
)
from compile.graph import constant, dims_of, ir

# Operators with a kernel for codes whose result has a range of its own.
_OWN_RANGE = ("Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Concat", "Relu")
# Operators that only move values, and take uint8 as well as float.
MOVING = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Resize", "Pad")


@dataclasses.dataclass
class Plan:
    """Nodes that compute on codes, in the order of the graph, and why operators with weights do not.

    `results` maps the value that a node's codes stand for to the node: its own output, or that of the Relu or Clip
    behind it. `joins`: each Concat whose inputs can all be made with its own scale, since nobody else reads them.
    """

    on_codes: dict[ir.Node, None]
    matrices: dict[ir.Node, None]
    left: dict[ir.Node, str]
    results: dict[ir.Value, ir.Node]
    joins: set[ir.Node]


def wanted(model: ir.Model) -> list[str]:
    """Names of the values whose ranges `lower` needs, in the order of the graph."""
    plan = plan_codes(model, {})
    names: dict[str, None] = {}
    for node in (*plan.on_codes, *plan.matrices):
        if is_op(node, *MOVING):
            continue
        for value in node.inputs[:1] if is_product(node) else ():
            names[root_of(value).name or ""] = None
        if node in plan.on_codes:
            names[result_of(node).name or ""] = None
    return list(names)


def plan_codes(model: ir.Model, unfit: Mapping[str, str]) -> Plan:
    """The plan for a graph in which the values named in `unfit` must stay float, each for the reason given."""
    left: dict[ir.Node, str] = {}
    on_codes: dict[ir.Node, None] = {}
    matrices: dict[ir.Node, None] = {}
    for node in model.graph:
        try:
            if is_op(node, "Conv"):
                _check_conv(node, unfit)
                on_codes[node] = None
            elif is_op(node, "MatMul", "Gemm"):
                _check_matrix(node, unfit)
                matrices[node] = None
            elif _can_compute_on_codes(node, unfit):
                on_codes[node] = None
        except Leave as leave:
            left[node] = leave.reason
    plan = Plan(on_codes, matrices, left, {}, set())
    _prune(plan)
    plan.joins = {node for node in plan.on_codes if is_op(node, "Concat") and _one_reader(node, plan)}
    return plan


def _prune(plan: Plan) -> None:
    """Drop nodes that would need codes made, or give codes that nobody wants, until none is left to drop."""
    while True:
        plan.results, absorbed = {}, set()
        for node in plan.on_codes:
            if node not in absorbed:
                plan.results.update(dict.fromkeys(_results(node), node))
                absorbed.update(absorbed_by(node))
        useless = [n for n in plan.on_codes if n not in absorbed and not is_op(n, "Conv") and not _pays(n, plan)]
        if not useless:
            for node in absorbed:
                plan.on_codes.pop(node, None)
            return
        for node in useless:
            del plan.on_codes[node]


def _one_reader(concat: ir.Node, plan: Plan) -> bool:
    """Whether nobody else reads what is joined, so that it can all be made with one scale. What was cut off by a Relu
    in one of them and not in another needs scales of its own: the ends of the range do the cutting."""
    makers = [plan.results.get(value) if sole_reader(value) is concat else None for value in _data_inputs(concat)]
    return all(maker is not None and not is_op(maker, *MOVING) for maker in makers) and (
        len({cut_off(maker) for maker in makers if maker is not None}) == 1
    )


def cut_off(node: ir.Node) -> tuple[float, float]:
    """Where the Relus and Clips behind a node end its range."""
    ends = [bounds for follower in absorbed_by(node) if (bounds := _bounds(follower)) is not None]
    return max((low for low, _ in ends), default=-np.inf), min((high for _, high in ends), default=np.inf)


def _results(node: ir.Node) -> list[ir.Value]:
    return list(node.outputs) if is_op(node, *MOVING) else [result_of(node)]


def _pays(node: ir.Node, plan: Plan) -> bool:
    data = _data_inputs(node)
    if not data or any(value not in plan.results and scalar(value) is None for value in data):
        return False
    if all(value not in plan.results for value in data):
        return False
    readers = {use.node for value in _results(node) for use in value.uses()}
    return any(reader in plan.on_codes or reader in plan.matrices for reader in readers)


def _data_inputs(node: ir.Node) -> list[ir.Value]:
    """Inputs that must be codes; shapes, axes and pads are not among them."""
    inputs = node.inputs if is_op(node, "Add", "Mul", "Concat") else node.inputs[:1]
    return [value for value in inputs if value is not None]


# -- what can be quantized ----------------------------------------------------------------------------------


def weight_of(node: ir.Node) -> tuple[ir.Value, ir.TensorProtocol, bool]:
    """The constant float weight of a product, and whether it stands behind a Transpose; Leave where there is none."""
    value, transposed = behind_cast(node.inputs[1]), False
    producer = value.producer() if value is not None else None
    if producer is not None and is_op(producer, "Transpose") and is_op(node, "MatMul", "Gemm"):
        behind = behind_cast(producer.inputs[0])
        matrix = constant(behind)
        if matrix is not None and len(matrix.shape) == 2 and ints(producer, "perm") in ([], [1, 0]):
            value, transposed = behind, True
    tensor = constant(value)
    if value is None or tensor is None:
        raise not_constant(node, 1)
    require_float(tensor)
    return value, tensor, transposed


def _check_conv(node: ir.Node, unfit: Mapping[str, str]) -> None:
    weight_of(node)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and constant(behind_cast(bias)) is None:
        raise Leave("the bias is computed")
    _check_data(node)
    if _captured(result_of(node)):
        raise Leave("a subgraph reads the result, where onnxruntime cannot tell whether it is codes")
    for value in (root_of(node.inputs[0]), result_of(node)):
        _check_fit(value, unfit)


def _check_matrix(node: ir.Node, unfit: Mapping[str, str]) -> None:
    _, tensor, _ = weight_of(node)
    if len(tensor.shape) != 2:
        raise Leave(f"weight with {len(tensor.shape)} dimensions")
    if tensor.size < MIN_ELEMENTS:
        raise Leave(f"fewer than {MIN_ELEMENTS} weights")
    _check_data(node)
    if rank_of(node.inputs[0]) < 2:
        raise Leave("the data is a vector, or of unknown rank")
    _check_fit(root_of(node.inputs[0]), unfit)


def _check_data(node: ir.Node) -> None:
    data = node.inputs[0]
    if data is None or data.dtype != ir.DataType.FLOAT:
        raise Leave("the data is not FLOAT")
    if constant(data) is not None:
        raise Leave("both sides are constant")


def _check_fit(value: ir.Value | None, unfit: Mapping[str, str]) -> None:
    reason = unfit.get(value.name or "") if value is not None else "no data input"
    if reason is not None:
        raise Leave(f"{value.name if value else ''!r}: {reason}")


def _can_compute_on_codes(node: ir.Node, unfit: Mapping[str, str]) -> bool:
    if any(value.dtype != ir.DataType.FLOAT for value in node.outputs) or any(map(_captured, _results(node))):
        return False
    if is_op(node, *_OWN_RANGE):
        rank = rank_of(node.inputs[0])
        pools = is_op(node, "AveragePool", "GlobalAveragePool")
        return (not pools or rank == 4) and (result_of(node).name or "") not in unfit
    if not is_op(node, *MOVING) or constant(node.inputs[0]) is not None:
        return False
    if node.op_type == "Resize":
        return bool(attribute(node, "mode", "nearest") == "nearest")
    if node.op_type == "Pad":
        fill = node.inputs[2] if len(node.inputs) > 2 else None
        return fill is None or scalar(fill) == 0
    return node.op_type != "MaxPool" or len(node.outputs) == 1


def row_of(value: ir.Value | None, n: int, rank: int) -> npt.NDArray[np.float32] | None:
    """float32 [n] of a constant that broadcasts along the last axis of a value of that rank; None for all else."""
    tensor = constant(behind_cast(value))
    if tensor is None or tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return None
    dims = dims_of(tensor)
    if len(dims) > rank or tensor.size not in (1, n) or (tensor.size == n and n > 1 and dims[-1] != n):
        return None
    row = np.empty(n, np.float32)
    row[:] = tensor.numpy().reshape(-1)
    return row


def rank_of(value: ir.Value | None) -> int:
    """Dimensions of a value; 0 where they are not known."""
    return len(value.shape) if value is not None and value.shape is not None else 0


def _captured(value: ir.Value) -> bool:
    """Whether a subgraph reads the value: onnxruntime 1.32 aborts where it is what DequantizeLinear restored."""
    return any(use.node.graph is not value.graph for use in value.uses())


def is_product(node: ir.Node) -> bool:
    """Whether the scheme quantizes the node's weight together with its data."""
    return is_op(node, "Conv", "MatMul", "Gemm")


def root_of(value: ir.Value | None) -> ir.Value:
    """The value that a chain of moves begins with: its range holds for all of them."""
    if value is None:
        raise Leave("no data input")
    producer = value.producer()
    if producer is not None and is_op(producer, *MOVING) and _can_compute_on_codes(producer, {}):
        return root_of(producer.inputs[0])
    return value


def result_of(node: ir.Node) -> ir.Value:
    """The node's output, or that of the Relu or Clip behind it which its codes make superfluous."""
    absorbed = absorbed_by(node)
    return absorbed[-1].outputs[0] if absorbed else node.outputs[0]


def absorbed_by(node: ir.Node) -> list[ir.Node]:
    """The Relus and Clips right behind a node that makes codes of a range of its own."""
    found: list[ir.Node] = []
    follower = sole_reader(node.outputs[0]) if not is_op(node, *MOVING) else None
    while follower is not None and _bounds(follower) is not None:
        found.append(follower)
        follower = sole_reader(follower.outputs[0])
    return found


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    """Where a node cuts values off, if it does only that, and lets zero pass; the ends of a range do the same."""
    if is_op(node, "Relu"):
        return 0.0, np.inf
    if not is_op(node, "Clip"):
        return None
    given = [node.inputs[at] if at < len(node.inputs) else None for at in (1, 2)]
    low, high = (
        otherwise if value is None else scalar(value) for value, otherwise in zip(given, (-np.inf, np.inf), strict=True)
    )
    return (low, high) if low is not None and high is not None and low <= 0 <= high else None
