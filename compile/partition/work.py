"""What a node takes at least to compute on a board: the arithmetic of its products, and the weights it must read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compile.graph import constant, ir
from targets.board import Board

# Operators whose every output element is a sum of products along the last axis of the first input.
_MATRIX = frozenset(
    {"MatMul", "Gemm", "MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulInteger", "QLinearMatMul"}
)
# The same along all axes but the first of the weight.
_CONVOLUTION = frozenset({"Conv", "ConvInteger"})
# Of these a run reads the rows that it asks for.
_TABLE = frozenset({"Gather", "GatherND", "GatherElements"})


def work_ns(node: ir.Node, nbytes: Mapping[str, int], board: Board) -> int:
    """A lower estimate in ns; `nbytes` gives bytes of values at the largest shapes, by name.

    Operators without weights or products may be fused into others, so they count nothing. The board's fastest type is
    assumed: no more loading is to be thought hidden under the node than is.
    """
    tensors = (constant(value) for value in node.inputs) if node.op_type not in _TABLE else ()
    weights = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    made = node.outputs[0] if node.outputs else None
    elements = 0.0 if made is None or made.dtype is None else nbytes.get(made.name or "", 0) / made.dtype.itemsize
    operations = 2 * elements * _depth(node)
    return int(max(weights / board.bandwidth.dram_gb_s, operations / max(board.compute.values())))


def _depth(node: ir.Node) -> int:
    """Products in the sum of one output element; 0 where that is not known, or there is none."""
    if node.op_type in _MATRIX:
        dims = _dims(node, 0) or [0]
        return dims[0] if "transA" in node.attributes and node.attributes["transA"].as_int() else dims[-1]
    if node.op_type in _CONVOLUTION:
        return math.prod(_dims(node, 1)[1:] or [0])
    return 0


def _dims(node: ir.Node, index: int) -> list[int]:
    """Shape of an input, 0 for a dimension that is not fixed; empty where it is not known."""
    value = node.inputs[index] if index < len(node.inputs) else None
    shape = value.shape if value is not None else None
    return [dim if isinstance(dim, int) else 0 for dim in shape] if shape is not None else []
