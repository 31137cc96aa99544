"""What a node takes at least to compute on a board: the arithmetic of its products, and the bytes it must move."""

from __future__ import annotations

from collections.abc import Mapping

from compile.graph import constant, ir
from targets.board import Board

# Operators whose every output element is a sum of products along the last axis of the first input.
_MATRIX = frozenset(
    {"MatMul", "Gemm", "MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulInteger", "QLinearMatMul"}
)
# The same along all axes but the first of the weight.
_CONVOLUTION = frozenset({"Conv", "ConvInteger"})


def work_ns(node: ir.Node, nbytes: Mapping[str, int], board: Board) -> int:
    """A lower estimate in ns. `nbytes` of values at the largest shapes, by name; what is not there counts nothing.

    The board's fastest type is assumed, so that no more loading is thought to hide under the node than does.
    """
    moved = sum(_nbytes(value, nbytes) for value in {*node.inputs, *node.outputs} if value is not None)
    made = node.outputs[0] if node.outputs else None
    elements = 0 if made is None or made.dtype is None else _nbytes(made, nbytes) / made.dtype.itemsize
    operations = 2 * elements * _depth(node)
    return int(max(moved / board.bandwidth.dram_gb_s, operations / max(board.compute.values())))


def _nbytes(value: ir.Value, nbytes: Mapping[str, int]) -> int:
    tensor = constant(value)
    return nbytes.get(value.name or "", 0) if tensor is None else tensor.nbytes


def _depth(node: ir.Node) -> int:
    """Products in the sum of one output element; 0 where that is not known, or there is none."""
    if node.op_type in _MATRIX:
        shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
        last = shape[-1] if shape is not None and len(shape) else 0
        return last if isinstance(last, int) else 0
    if node.op_type in _CONVOLUTION and len(node.inputs) > 1 and node.inputs[1] is not None:
        shape = node.inputs[1].shape
        depth = 1
        for dim in shape[1:] if shape is not None else (0,):
            depth *= dim if isinstance(dim, int) else 0
        return depth
    return 0
