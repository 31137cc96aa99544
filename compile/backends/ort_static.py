"""INT8 with calibrated activations: which operators compute on codes, and the graph that says so.

    Conv               QuantizeLinear, DequantizeLinear on every side: onnxruntime makes QLinearConv of it
    Add, Mul, ...      the same, where all inputs are codes already and somebody behind wants codes
    MaxPool, Slice ... on the codes themselves: they only move values
    Relu, Clip         gone: the codes in front saturate where they would
    MatMul, Gemm       com.microsoft MatMulIntegerToFloat, with its bias; the result is float
    ConvTranspose      DequantizeLinear of INT8 weights, then the float kernel: there is no other

Activations are uint8, weights int8 with a scale for each output channel. On x86-64 without VNNI the kernels for this
pair add two products in 16 bits; there the scheme asks for weights of 7 bits, whose sums fit. (The session setting
`session.x64quantprecision` is no way out: onnxruntime 1.32 obeys it on processors with VNNI too, at a third of the
speed.)
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.backends.base import Lowered
from compile.backends.ort_codes import (
    MOVING,
    Plan,
    absorbed_by,
    cut_off,
    is_product,
    plan_codes,
    rank_of,
    result_of,
    root_of,
    row_of,
    wanted,
    weight_of,
)
from compile.backends.ort_rewrite import (
    CONTRIB,
    MIN_ELEMENTS,
    Constants,
    Leave,
    attribute,
    behind_cast,
    graph_of,
    is_op,
    scalar,
    sole_reader,
    take_over,
)
from compile.calibrate.collectors import Range, Unfit
from compile.graph import constant, dims_of, ir, nodes_of
from compile.quantize.blockwise import Once
from compile.quantize.per_channel import channel_scales, quantize_channels
from compile.quantize.static import Affine, StaticWeight, quantize_static
from targets.bundle import LeftAlone

# DequantizeLinear has had an axis since opset 13, and pooling, padding and resizing take uint8.
OPSET = 13
# Operators whose weights the scheme quantizes.
QUANTIZED = ("Conv", "ConvTranspose", "MatMul", "Gemm")

# Operators with weights for which there is no such kernel, with the reason.
_NO_KERNEL = "no INT8 kernel for this operator"
_WEIGHTY = ("LSTM", "GRU", "RNN", "Gather")


@dataclasses.dataclass(frozen=True)
class _Codes:
    """uint8 codes of a value, and the constants that say what they mean."""

    value: ir.Value
    affine: Affine
    scale: ir.Value
    zero: ir.Value


def lower(model: ir.Model, ranges: Mapping[str, Range | Unfit], largest: int) -> Lowered:
    """Rewrite the graph in place; what has no usable range stays float. Weights get codes up to `largest`."""
    unfit = {name: found.reason for name, found in ranges.items() if isinstance(found, Unfit)}
    unfit |= {name: "no calibration" for name in wanted(model) if name not in ranges}
    spans = {name: found for name, found in ranges.items() if isinstance(found, Range)}
    plan = plan_codes(model, unfit)
    report = _Report()
    in_subgraphs = set(nodes_of(model)) - set(model.graph)
    for node in nodes_of(model):
        if node not in in_subgraphs:
            report.account(node, plan)
        elif is_op(node, "Conv", "MatMul", "Gemm", *_WEIGHTY):
            report.leave(node, "inside a subgraph, which is not calibrated")
    _Emitter(model, plan, spans, largest).emit(report)
    return report.lowered()


class _Report:
    """What became of every operator with weights."""

    def __init__(self) -> None:
        self.quantized: collections.Counter[str] = collections.Counter()
        self._left: dict[tuple[str, str], list[int]] = {}

    def account(self, node: ir.Node, plan: Plan) -> None:
        if node in plan.left:
            self.leave(node, plan.left[node])
        elif is_product(node):
            self.quantized[node.op_type] += 1
        elif not is_op(node, "ConvTranspose") and node not in plan.on_codes:
            moves = is_op(node, "Reshape", "Identity", "Transpose", "Cast", "QuantizeLinear", "DequantizeLinear")
            if (_weight_bytes(node) and not moves) or is_op(node, "LSTM", "GRU", "RNN"):
                self.leave(node, _NO_KERNEL)

    def leave(self, node: ir.Node, reason: str) -> None:
        self._left.setdefault((node.op_type, reason), []).append(_weight_bytes(node))

    def lowered(self) -> Lowered:
        rows = sorted(self._left.items())
        left = tuple(LeftAlone(op, len(sizes), sum(sizes), reason) for (op, reason), sizes in rows)
        return Lowered(dict(sorted(self.quantized.items())), left)


def _weight_bytes(node: ir.Node) -> int:
    tensors = (constant(behind_cast(value)) for value in node.inputs)
    return sum(t.nbytes for t in tensors if t is not None and t.size >= MIN_ELEMENTS)


class _Emitter:
    def __init__(self, model: ir.Model, plan: Plan, spans: Mapping[str, Range], largest: int) -> None:
        self._model, self._plan, self._spans, self._largest = model, plan, spans, largest
        self._constants = Constants(model)
        self._codes: dict[ir.Value, _Codes] = {}

    def emit(self, report: _Report) -> None:
        for node in list(self._model.graph):
            if is_op(node, "ConvTranspose"):
                self._transposed_conv(node, report)
            elif node in self._plan.matrices:
                self._matrix(node)
            elif node not in self._plan.on_codes:
                continue
            elif is_op(node, *MOVING):
                self._move(node)
            elif is_op(node, "Conv"):
                self._conv(node)
            elif node in self._plan.joins:
                self._join(node)
            else:
                self._compute(node)
        if self._plan.matrices:
            self._model.graph.opset_imports.setdefault(CONTRIB, 1)

    # -- operators -------------------------------------------------------------------------------------------

    def _conv(self, node: ir.Node) -> None:
        weight, tensor, _ = weight_of(node)
        data = self._codes_of(node.inputs[0], node)
        bias = constant(behind_cast(node.inputs[2])) if len(node.inputs) > 2 else None
        name, scale, dims = weight.name or "", data.affine.scale, dims_of(tensor)

        def compute() -> StaticWeight:
            return quantize_static(
                name, tensor.numpy(), None if bias is None else bias.numpy(), scale, 0, self._largest
            )

        shared = Once(compute, 2 if bias is None else 4)
        add = self._constants.add_lazy
        codes = add(f"{node.name}.weight", ir.DataType.INT8, dims, lambda: shared.get().codes)
        scales = add(f"{node.name}.weight.scale", ir.DataType.FLOAT, dims[:1], lambda: shared.get().scales)
        inputs = [self._restore(node, data), self._dequantize(node, codes, scales, axis=0)]
        if bias is not None:
            steps = add(f"{node.name}.bias", ir.DataType.INT32, dims[:1], lambda: shared.get().bias)
            both = add(f"{node.name}.bias.scale", ir.DataType.FLOAT, dims[:1], lambda: shared.get().scales * scale)
            inputs.append(self._dequantize(node, steps, both, axis=0))
        for at, value in enumerate(inputs):
            node.replace_input_with(at, value)
        self._give_codes(node)

    def _compute(self, node: ir.Node) -> None:
        """An operator with a kernel for codes, between DequantizeLinear and QuantizeLinear."""
        for at, value in enumerate(node.inputs):
            if value in self._codes:
                node.replace_input_with(at, self._restore(node, self._codes[value]))
            elif value is not None and is_op(node, "Add", "Mul", "Concat"):
                node.replace_input_with(at, self._restore(node, self._scalar_codes(value)))
        self._give_codes(node)

    def _move(self, node: ir.Node) -> None:
        """An operator that only moves values, on the codes themselves."""
        codes = self._codes_of(node.inputs[0], node)
        node.replace_input_with(0, codes.value)
        if is_op(node, "Pad") and attribute(node, "mode", "constant") == "constant":
            node.resize_inputs(max(len(node.inputs), 3))
            node.replace_input_with(2, codes.zero)
        for value in node.outputs:
            self._retype(node, value, codes)

    def _join(self, node: ir.Node) -> None:
        """A Concat of codes that all have one scale."""
        joined = [self._codes_of(value, node) for value in node.inputs]
        for at, codes in enumerate(joined):
            node.replace_input_with(at, codes.value)
        self._retype(node, node.outputs[0], joined[0])

    def _matrix(self, node: ir.Node) -> None:
        _, tensor, behind_transpose = weight_of(node)
        gemm = is_op(node, "Gemm")
        transposed = behind_transpose != bool(gemm and attribute(node, "transB", 0))
        alpha = float(attribute(node, "alpha", 1.0)) if gemm else 1.0
        beta = float(attribute(node, "beta", 1.0)) if gemm else 1.0
        weight = weight_of(node)[0].name or ""
        axis = 0 if transposed else 1
        n, k = (dims_of(tensor)[at] for at in (axis, 1 - axis))
        data = self._codes_of(node.inputs[0], node)
        value, new = data.value, []
        if gemm and attribute(node, "transA", 0):
            turn = ir.node("Transpose", [value], {"perm": [1, 0]}, name=f"{node.name}.turn")
            turn.outputs[0].name = self._constants.names.make(f"{node.name}.turned")
            value, new = turn.outputs[0], [turn]
        codes, scales = self._matrix_weight(weight, tensor, axis, (k, n), alpha)
        bias, rest, last = self._matrix_bias(node, n, beta)
        inputs = [value, codes, data.scale, scales, data.zero, *([None, bias] if bias is not None else [])]
        multiply = ir.node("MatMulIntegerToFloat", inputs, domain=CONTRIB, name=f"{node.name}.quantized")
        new.append(multiply)
        result = multiply.outputs[0]
        if rest is not None:
            result.name = self._constants.names.make(f"{node.name}.product")
            new += self._add_behind(node, result, rest, beta)
            result = new[-1].outputs[0]
        if last is not node:
            # The Add behind it was taken in as the bias.
            ir.convenience.replace_all_uses_with(last.outputs[0], node.outputs[0], replace_graph_outputs=True)
            name, shape = last.outputs[0].name, last.outputs[0].shape
            graph_of(last).remove(last, safe=True)
            node.outputs[0].name, node.outputs[0].shape = name, shape
        take_over(node, new, result)

    def _matrix_weight(
        self, name: str, tensor: ir.TensorProtocol, axis: int, shape: tuple[int, int], alpha: float
    ) -> tuple[ir.Value, ir.Value]:
        """int8 [K, N] and float32 [N]."""
        suffix = ".T" if axis == 0 else ""

        def codes() -> npt.NDArray[Any]:
            made: npt.NDArray[np.int8] = quantize_channels(name, tensor.numpy(), axis, self._largest)[0]
            return made.T if axis == 0 else made

        def scales() -> npt.NDArray[np.float32]:
            made: npt.NDArray[np.float32] = channel_scales(name, tensor.numpy(), axis, self._largest)
            return np.asarray(made * np.float32(alpha), np.float32)

        return (
            self._constants.add_lazy(f"{name}{suffix}.int8", ir.DataType.INT8, shape, codes, f"int8{suffix}:{name}"),
            self._constants.add_lazy(f"{name}{suffix}.scale", ir.DataType.FLOAT, shape[1:], scales),
        )

    def _matrix_bias(self, node: ir.Node, n: int, beta: float) -> tuple[ir.Value | None, ir.Value | None, ir.Node]:
        """What the kernel adds itself, what must be added behind it, and the node whose result that is."""
        given = node.inputs[2] if is_op(node, "Gemm") and len(node.inputs) > 2 else None
        if given is not None and beta:
            row = row_of(given, n, 2)
            if row is None:
                return None, given, node
            return self._constants.add(f"{node.name}.bias", (row * beta).astype(np.float32)), None, node
        follower = sole_reader(node.outputs[0])
        if follower is not None and is_op(follower, "Add"):
            other = follower.inputs[1 if follower.inputs[0] is node.outputs[0] else 0]
            row = row_of(other, n, rank_of(node.outputs[0]))
            if row is not None:
                return self._constants.add(f"{node.name}.bias", row), None, follower
        return None, None, node

    def _add_behind(self, node: ir.Node, product: ir.Value, rest: ir.Value, beta: float) -> list[ir.Node]:
        """`product + beta * rest`, where the kernel cannot add it."""
        new: list[ir.Node] = []
        if beta != 1:
            factor = self._constants.add(f"{node.name}.beta", np.float32(beta))
            new.append(ir.node("Mul", [rest, factor], name=f"{node.name}.scaled"))
            rest = new[0].outputs[0]
            rest.name = self._constants.names.make(f"{node.name}.scaled")
        return [*new, ir.node("Add", [product, rest], name=f"{node.name}.add")]

    def _transposed_conv(self, node: ir.Node, report: _Report) -> None:
        try:
            weight, tensor, _ = weight_of(node)
            if tensor.size < MIN_ELEMENTS:
                raise Leave(f"fewer than {MIN_ELEMENTS} weights")
        except Leave as leave:
            report.leave(node, leave.reason)
            return
        # Input channels come first, and all groups share the axis of the outputs.
        name, dims = weight.name or "", dims_of(tensor)
        add = self._constants.add_lazy
        codes = add(f"{name}.int8", ir.DataType.INT8, dims, lambda: quantize_channels(name, tensor.numpy(), 1)[0])
        scales = add(f"{name}.scale", ir.DataType.FLOAT, dims[1:2], lambda: channel_scales(name, tensor.numpy(), 1))
        node.replace_input_with(1, self._dequantize(node, codes, scales, axis=1))
        report.quantized["ConvTranspose"] += 1

    # -- codes -----------------------------------------------------------------------------------------------

    def _codes_of(self, value: ir.Value | None, reader: ir.Node) -> _Codes:
        """The codes of a value; made in front of the reader where nothing makes them."""
        if value is None:
            raise ValueError(f"{reader.name!r} has no data input")
        if value not in self._codes:
            name = value.name or ""
            affine = Affine.of(self._spans[root_of(value).name or ""])
            codes = self._meaning(name, affine)
            quantize = ir.node("QuantizeLinear", [value, codes.scale, codes.zero], name=f"{name}.quantize")
            self._place(quantize, f"{name}.codes", value, ir.DataType.UINT8)
            graph_of(reader).insert_before(reader, quantize)
            self._codes[value] = dataclasses.replace(codes, value=quantize.outputs[0])
        return self._codes[value]

    def _meaning(self, name: str, affine: Affine) -> _Codes:
        scale, zero = (
            self._constants.add(f"{name}.scale", affine.scale),
            self._constants.add(f"{name}.zero", affine.zero_point),
        )
        return _Codes(scale, affine, scale, zero)

    def _give_codes(self, node: ir.Node) -> None:
        """Quantize a node's result; what only cut it off is dropped, since the codes end there."""
        result = result_of(node)
        own = node.outputs[0]
        codes = self._meaning(result.name or "", self._affine(node))
        quantize = ir.node("QuantizeLinear", [own, codes.scale, codes.zero], name=f"{result.name}.quantize")
        self._place(quantize, f"{result.name}.codes", result, ir.DataType.UINT8)
        absorbed = absorbed_by(node)
        restore = self._restoring(result, dataclasses.replace(codes, value=quantize.outputs[0]))
        ir.convenience.replace_all_uses_with(result, restore.outputs[0], replace_graph_outputs=True)
        for follower in reversed(absorbed):
            graph_of(follower).remove(follower, safe=True)
        name = result.name
        own.name = self._constants.names.make(f"{name}.float")
        if result is not own:
            result.name = None
        restore.outputs[0].name = name
        # The quantizer reads the node's own output, which the replacement above may have redirected.
        quantize.replace_input_with(0, own)
        graph_of(node).insert_after(node, [quantize, restore])
        self._codes[restore.outputs[0]] = dataclasses.replace(codes, value=quantize.outputs[0])

    def _retype(self, node: ir.Node, value: ir.Value, like: _Codes) -> None:
        """A moved value holds codes now; who reads floats gets them restored."""
        codes = dataclasses.replace(like, value=value)
        restore = self._restoring(value, codes)
        ir.convenience.replace_all_uses_with(value, restore.outputs[0], replace_graph_outputs=True)
        restore.replace_input_with(0, value)
        restore.outputs[0].name = value.name
        value.name, value.dtype = self._constants.names.make(f"{value.name}.codes"), ir.DataType.UINT8
        graph_of(node).insert_after(node, restore)
        self._codes[restore.outputs[0]] = codes

    def _restoring(self, value: ir.Value, codes: _Codes) -> ir.Node:
        node = ir.node("DequantizeLinear", [codes.value, codes.scale, codes.zero], name=f"{value.name}.restore")
        node.outputs[0].shape, node.outputs[0].dtype = value.shape, ir.DataType.FLOAT
        return node

    def _restore(self, reader: ir.Node, codes: _Codes) -> ir.Value:
        """Floats of codes for one reader alone: the runtime fuses only pairs that nobody shares."""
        node = self._restoring(codes.value, codes)
        node.outputs[0].name = self._constants.names.make(f"{codes.value.name}.for.{reader.name}")
        node.name = node.outputs[0].name
        graph_of(reader).insert_before(reader, node)
        return node.outputs[0]

    def _dequantize(self, reader: ir.Node, codes: ir.Value, scale: ir.Value, axis: int) -> ir.Value:
        node = ir.node("DequantizeLinear", [codes, scale], {"axis": axis}, name=f"{codes.name}.restore")
        self._place(node, f"{codes.name}.float", codes, ir.DataType.FLOAT)
        graph_of(reader).insert_before(reader, node)
        return node.outputs[0]

    def _place(self, node: ir.Node, name: str, like: ir.Value, dtype: ir.DataType) -> None:
        result = node.outputs[0]
        result.name, result.shape, result.dtype = self._constants.names.make(name), like.shape, dtype

    def _scalar_codes(self, value: ir.Value) -> _Codes:
        """One number as codes that hold it exactly."""
        number = scalar(value)
        if number is None:
            raise ValueError(f"{value.name!r} is no number")
        affine = Affine(np.float32(abs(number) or 1), np.uint8(number < 0))
        code = np.uint8(1 if number > 0 else 0)
        constants = self._meaning(value.name or "", affine)
        tensor = constant(value)
        shape = dims_of(tensor) if tensor is not None else ()
        return dataclasses.replace(constants, value=self._constants.add(f"{value.name}.code", np.full(shape, code)))

    def _affine(self, node: ir.Node) -> Affine:
        """The codes of a node's result: those of the Concat that alone reads it, where all its inputs are such."""
        result = result_of(node)
        reader = sole_reader(result)
        if reader in self._plan.joins:
            return self._affine(reader)
        span, (low, high) = self._spans[result.name or ""], cut_off(node)
        return Affine.of(Range(max(span.low, low), min(span.high, high)))
