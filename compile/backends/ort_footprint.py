"""Where onnxruntime keeps weights: which it copies when it lays them out anew, and which stay in the mapped file.

Found by measuring sessions of onnxruntime 1.32 on x86-64 (proportional set size by kind, before and after load):
kernels that prepack own a copy and drop the mapping of their source; everything else is read through the mapping.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from compile.backends.base import WeightFootprint
from compile.graph import bodies_of, constant, dims_of, ir
from compile.shapes import largest_nbytes
from compile.writer import INLINE_BYTES

# Graph, kernel and execution-plan objects of one node: 5.0 to 6.2 KiB over models of 227 to 1764 nodes.
SESSION_BYTES_PER_NODE = 6400
# What a convolution has more of them when it is made to compute in blocks of channels: 5.5 and 7.4 KiB.
BLOCKED_CONV_BYTES = 7680
# What a MatMulNBits kernel holds beside its packed weights; 13 to 15 KiB measured over 160 and 211 of them.
BLOCK_KERNEL_BYTES = 14 << 10
# Every tensor of a bundle begins on a page of its own, and is resident in whole pages.
PAGE_BYTES = 4096
# Channels in a block of MLAS's NCHWc layout: 16 with AVX-512, 8 with AVX2.
CHANNELS = 16
# A filter is read, reordered, and made a tensor, which is copied: four times in memory, until the next one.
FILTER_COPIES = 4


@dataclasses.dataclass
class _Weights:
    """What was found so far; a weight that several nodes use is there once, by its name."""

    heap: dict[str, int] = dataclasses.field(default_factory=dict)
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    mapped: dict[str, int] = dataclasses.field(default_factory=dict)
    filters: dict[str, int] = dataclasses.field(default_factory=dict)
    touched: set[str] = dataclasses.field(default_factory=set)
    in_copies: set[str] = dataclasses.field(default_factory=set)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    whole: set[str] = dataclasses.field(default_factory=set)
    scratch: dict[str, int] = dataclasses.field(default_factory=dict)
    widened: int = 0


def weight_footprint(
    model: ir.Model, sizes: Mapping[str, int], start: int = 0, end: int | None = None
) -> WeightFootprint:
    """Bytes on the heap and in the mapping; a weight that one user copies and another maps counts twice. Of the nodes
    [start, end) in the model's order, where not all of them are asked for. `sizes`: the largest of each dimension.

    The optimizer lays out filters first, one at a time; then kernels, one at a time, the other weights they copy. A
    weight that is an output as it stands is read where it is.
    """
    found = _Weights()
    nodes = 0
    indexes = False
    for node in _within(model, start, end):
        nodes += 1
        copied = dict(_copied(node))
        indexes |= node.op_type in _FROM_ARENA and bool(copied)
        for index, value in enumerate(node.inputs):
            tensor = constant(value)
            if value is None or tensor is None or tensor.nbytes < INLINE_BYTES:
                continue
            _count(found, node, index, value.name or "", tensor.nbytes, copied.get(index))
            if index not in copied and index in _ROW_READERS.get(node.op_type, ()) and _first_axis(node):
                _count_rows(found, node, value.name or "", tensor, sizes)
    for value in model.graph.outputs if start == 0 else ():
        tensor = constant(value)
        if tensor is not None and tensor.nbytes >= INLINE_BYTES:
            found.mapped[value.name or ""] = _up(tensor.nbytes, PAGE_BYTES)
            found.whole.add(value.name or "")
    return _summary(found, nodes, indexes)


def _within(model: ir.Model, start: int, end: int | None) -> Iterator[ir.Node]:
    """Nodes of the graph, those of their bodies included."""
    for node in itertools.islice(model.graph, start, end):
        yield node
        for body in bodies_of(node):
            yield from ir.traversal.RecursiveGraphIterator(body)


def _count(found: _Weights, node: ir.Node, index: int, name: str, nbytes: int, copy: int | None) -> None:
    pages = _up(nbytes, PAGE_BYTES)
    if copy is None:
        found.mapped[name] = pages
        if node.op_type == "MatMulNBits":
            # Scales and zero points go into the copy of the codes, and into the sums that are made with it; scales are
            # copied for it.
            found.touched.add(name)
            found.in_copies.add(name)
            if index == _SCALES:
                codes = node.inputs[1]
                found.scratch[(codes.name if codes else None) or ""] = nbytes
                # Without a copy to multiply with, the kernel takes as much more as the matrix in float32: inferred from
                # measured sizes.
                found.widened = max(found.widened, 4 * node.attributes["K"].as_int() * node.attributes["N"].as_int())
        elif index not in _ROW_READERS.get(node.op_type, ()) or not _first_axis(node):
            found.whole.add(name)
        return
    found.heap[name] = copy
    if node.op_type == "Conv":
        found.filters[name] = copy
    else:
        found.sources[name] = pages


def _first_axis(node: ir.Node) -> bool:
    attributes = [node.attributes[name] for name in ("axis", "gather_axis") if name in node.attributes]
    return all(each.as_int() == 0 for each in attributes)


def _count_rows(found: _Weights, node: ir.Node, name: str, tensor: ir.TensorProtocol, sizes: Mapping[str, int]) -> None:
    """The pages of a table that one run reads: a row lies in one more than it fills, if it begins within one."""
    whole = _up(tensor.nbytes, PAGE_BYTES)
    indices = node.inputs[1]
    taken = largest_nbytes(indices, sizes) if indices is not None and indices.dtype is not None else None
    if taken is None or indices is None or indices.dtype is None:
        found.rows[name] = whole
        return
    count = taken // max(int(indices.dtype.itemsize), 1)
    row = tensor.nbytes // max(dims_of(tensor)[0], 1)
    found.rows[name] = min(found.rows.get(name, 0) + count * (_up(row, PAGE_BYTES) + PAGE_BYTES), whole)


def _summary(found: _Weights, nodes: int, indexes: bool) -> WeightFootprint:
    heap, rearranged = sum(found.heap.values()), sum(found.filters.values())
    tied = found.mapped.keys() & found.sources.keys()
    sources = {name: nbytes for name, nbytes in found.sources.items() if name not in tied}
    transit = max(((found.scratch.get(name, 0), nbytes) for name, nbytes in sources.items()), key=sum, default=(0, 0))
    session = (
        nodes * SESSION_BYTES_PER_NODE
        + len(found.filters) * BLOCKED_CONV_BYTES
        + len(found.scratch) * BLOCK_KERNEL_BYTES
    )
    unread = found.in_copies - found.rows.keys() - found.whole
    tables = found.rows.keys() - found.whole
    return WeightFootprint(
        heap=heap,
        mapped=sum(found.mapped.values()),
        session=session,
        largest=max(found.heap.values(), default=0),
        largest_mapped=max(found.mapped.values(), default=0),
        copies=sum(_up(copy, PAGE_BYTES) + PAGE_BYTES for copy in found.heap.values()),
        rearranged=rearranged,
        sources=sum(sources.values()),
        touched=sum(found.mapped[name] for name in found.touched | tied),
        transit_heap=transit[0],
        transit_file=transit[1],
        optimizing=(FILTER_COPIES - 1) * max(found.filters.values(), default=0),
        unpacked_scratch=found.widened,
        unread=sum(found.mapped[name] for name in unread),
        tables=sum(found.mapped[name] for name in tables),
        rows=sum(found.rows[name] for name in tables),
        indexes=indexes,
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
    yield 1, n * blocks * (blob + 4 + 4)


def _int8_matrix(node: ir.Node) -> Iterator[tuple[int, int]]:
    codes = constant(node.inputs[1])
    if codes is None:
        return
    k, n = dims_of(codes)
    yield 1, _up(k, 4) * _up(n, 16) + 4 * n


def _filter(node: ir.Node) -> Iterator[tuple[int, int]]:
    """Filters in blocks of channels, as NchwcTransformer::TransformConv makes them; others are read as they are."""
    yield from _whole(2)(node)
    tensor = constant(node.inputs[1])
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(dims_of(tensor)) != 4:
        return
    outputs, inputs, height, width = dims_of(tensor)
    group = node.attributes["group"].as_int() if "group" in node.attributes else 1
    if group > 1:
        depthwise = inputs == 1 and outputs == group
        if outputs % CHANNELS or not (depthwise or inputs % CHANNELS == outputs // group % CHANNELS == 0):
            return
    elif inputs >= CHANNELS:
        if inputs % 4:
            return
        inputs = _up(inputs, CHANNELS)
    yield 1, _up(outputs, CHANNELS) * inputs * height * width * 4


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
    "Conv": _filter,
    "ConvTranspose": _whole(1),
    "LSTM": _whole(1, 2),
    "GRU": _whole(1, 2),
}
_SCALES = 2
# Inputs of which an operator reads the rows that its second input names.
_ROW_READERS = {"Gather": (0,), "GatherBlockQuantized": (0, 2, 3)}
# Kernels that take memory for their copy from the arena.
_FROM_ARENA = frozenset({"ConvTranspose"})
