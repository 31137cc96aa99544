"""Where onnxruntime keeps weights: which it copies when it lays them out anew, and which stay in the mapped file.

Found by measuring sessions of onnxruntime 1.32 on x86-64 (proportional set size by kind, before and after load):
kernels that prepack own a copy and drop the mapping of their source; everything else is read through the mapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from compile.backends.base import WeightFootprint
from compile.graph import constant, dims_of, ir, nodes_of
from compile.writer import INLINE_BYTES

# Graph, kernel and execution-plan objects of one node; between 4.5 and 6.2 KiB on the models measured.
SESSION_BYTES_PER_NODE = 5632
# What a MatMulNBits kernel holds beside its packed weights; 13 to 15 KiB measured over 160 and 211 of them.
BLOCK_KERNEL_BYTES = 14 << 10
# Every tensor of a bundle begins on a page of its own, and is resident in whole pages.
PAGE_BYTES = 4096


def weight_footprint(model: ir.Model) -> WeightFootprint:
    """Bytes on the heap and in the mapping after load; a weight that one user copies and another maps counts twice.

    Weights of convolutions are rearranged by the optimizer, all before the first source is let go: PP-OCR's detector,
    9.3 MiB of them, takes 20.7 MiB while it loads. Everything else is copied one weight at a time.
    """
    heap: dict[str, int] = {}
    mapped: dict[str, int] = {}
    rearranged = nodes = 0
    for node in nodes_of(model):
        nodes += 1
        copied = dict(_copied(node))
        for index, value in enumerate(node.inputs):
            tensor = constant(value)
            if value is None or tensor is None or tensor.nbytes < INLINE_BYTES:
                continue
            key = value.name or ""
            if index in copied:
                rearranged += copied[index] if node.op_type == "Conv" and key not in heap else 0
                heap[key] = copied[index]
            else:
                mapped[key] = _up(tensor.nbytes, PAGE_BYTES)
    return WeightFootprint(
        heap=sum(heap.values()),
        mapped=sum(mapped.values()),
        session=nodes * SESSION_BYTES_PER_NODE,
        largest=max(rearranged, *heap.values(), 0),
    )


def _copied(node: ir.Node) -> Iterator[tuple[int, int]]:
    """(input index, bytes of the copy) for every constant input that the node's kernel lays out anew."""
    rule = _RULES.get(node.op_type)
    if rule is not None:
        yield from rule(node)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _float_matrix(node: ir.Node) -> Iterator[tuple[int, int]]:
    """MLAS packs B in panels of 16 columns."""
    tensor = constant(node.inputs[1])
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return
    dims = dims_of(tensor)
    if len(dims) != 2:
        yield 1, tensor.nbytes
        return
    transposed = node.op_type == "Gemm" and "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    k, n = dims[::-1] if transposed else dims
    yield 1, k * _up(n, 16) * 4


def _block_matrix(node: ir.Node) -> Iterator[tuple[int, int]]:
    """Codes, a scale and a sum for each block. The source's scales and zero points stay mapped beside the copy."""
    codes = constant(node.inputs[1])
    if codes is None:
        return
    n, blocks, blob = dims_of(codes)
    yield 1, n * blocks * (blob + 4 + 4) + BLOCK_KERNEL_BYTES


def _int8_matrix(node: ir.Node) -> Iterator[tuple[int, int]]:
    codes = constant(node.inputs[1])
    if codes is None:
        return
    k, n = dims_of(codes)
    yield 1, _up(k, 4) * _up(n, 16) + 4 * n


def _int8_filter(node: ir.Node) -> Iterator[tuple[int, int]]:
    """The filter of a convolution on codes, packed group by group as a matrix; elsewhere it is restored as it is used.

    QLinearConv takes the place of the convolution only when its data is restored from codes too.
    """
    codes = constant(node.inputs[0])
    reader = next((use.node for use in node.outputs[0].uses()), None)
    data = reader.inputs[0].producer() if reader is not None and reader.inputs[0] is not None else None
    if codes is None or codes.dtype != ir.DataType.INT8 or reader is None or reader.op_type != "Conv":
        return
    if data is None or data.op_type != "DequantizeLinear":
        return
    outputs, *rest = dims_of(codes)
    groups = reader.attributes["group"].as_int() if "group" in reader.attributes else 1
    k, n = math.prod(rest), _up(outputs // groups, 16)
    yield 0, groups * (_up(k, 4) * n + 4 * n) if groups < outputs else codes.nbytes


def _whole(*inputs: int) -> Callable[[ir.Node], Iterator[tuple[int, int]]]:
    """Kernels whose copy is as large as the source."""

    def rule(node: ir.Node) -> Iterator[tuple[int, int]]:
        for index in inputs:
            tensor = constant(node.inputs[index]) if index < len(node.inputs) else None
            if tensor is not None:
                yield index, tensor.nbytes

    return rule


_RULES: dict[str, Callable[[ir.Node], Iterator[tuple[int, int]]]] = {
    "MatMul": _float_matrix,
    "Gemm": _float_matrix,
    "MatMulNBits": _block_matrix,
    "DynamicQuantizeMatMul": _int8_matrix,
    "MatMulIntegerToFloat": _int8_matrix,
    "DequantizeLinear": _int8_filter,
    "Conv": _whole(1, 2),
    "ConvTranspose": _whole(1),
    "LSTM": _whole(1, 2),
    "GRU": _whole(1, 2),
}
