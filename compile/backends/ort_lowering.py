"""Lowering for onnxruntime on a CPU: quantized operators in the form its kernels are fastest with.

    MatMul, Gemm     com.microsoft MatMulNBits (weights in blocks), or DynamicQuantizeMatMul (INT8 both sides)
    Gather (table)   com.microsoft GatherBlockQuantized
    Conv             DequantizeLinear of INT8 weights, then the float Conv

Every operator with weights is either rewritten and counted, or left and counted with the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compile.backends import ort_codes, ort_fuse, ort_static
from compile.backends.base import Lowered
from compile.backends.ort_rewrite import (
    CONTRIB,
    MIN_ELEMENTS,
    Leave,
    attribute,
    behind_cast,
    graph_of,
    is_op,
    not_constant,
    require_float,
)
from compile.calibrate.collectors import Range, Unfit
from compile.finite import refuse_nan
from compile.graph import SLICE, STORAGE, STORAGE_OFFSET, FreshNames, constant, dims_of, ir, nodes_of
from compile.passes.base import run_passes
from compile.passes.normalize import FixNames, InferShapes, LiftOpset, RemoveDeadCode, SortNodes
from compile.quantize.blockwise import BlockFormat, BlockQuantized, Once, quantize_matrix
from compile.quantize.per_channel import channel_scales, quantize_channels
from compile.quantize.schemes import Scheme
from targets.bundle import LeftAlone

# DequantizeLinear has had an axis since opset 13.
CONV_OPSET = 13

# Counted even where their weights are few or computed, so that the report accounts for every one.
_ALWAYS_COUNTED = ("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN")
_TOO_SMALL = f"fewer than {MIN_ELEMENTS} weights"


@dataclasses.dataclass(frozen=True)
class Weight:
    """A constant matrix as an operator uses it: rows [N, K] when `transposed`, else [K, N]."""

    value: ir.Value
    tensor: ir.TensorProtocol
    transposed: bool

    @property
    def n(self) -> int:
        return dims_of(self.tensor)[0 if self.transposed else 1]

    @property
    def k(self) -> int:
        return dims_of(self.tensor)[1 if self.transposed else 0]

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def turned(self) -> str:
        """Suffix of what is made of it: one matrix may be used both ways."""
        return ".T" if self.transposed else ""


def prepare(model: ir.Model, scheme: Scheme) -> list[str]:
    """Bring the graph into the form that is calibrated; names of the values whose ranges `lower` then needs."""
    if not scheme.static or not any(is_op(node, *ort_static.QUANTIZED) for node in model.graph):
        return []
    run_passes(model, [LiftOpset(ort_static.OPSET), InferShapes()])
    ort_fuse.fuse(model)
    run_passes(model, [RemoveDeadCode(), InferShapes(), FixNames(), SortNodes()])
    return ort_codes.wanted(model)


def lower(model: ir.Model, scheme: Scheme, ranges: Mapping[str, Range | Unfit] | None = None) -> Lowered:
    """Rewrite the graph in place; returns what was quantized and what was left, with reasons."""
    rewriter = _Rewriter(model, scheme)
    if scheme.static:
        lowered = ort_static.lower(model, ranges or {}, scheme.largest_code)
        rewriter.widen_the_rest()
        return lowered
    if scheme.conv_bits and any(node.op_type == "Conv" for node in nodes_of(model)):
        run_passes(model, [LiftOpset(CONV_OPSET)])
    for node in list(nodes_of(model)):
        rewriter.visit(node)
    rewriter.widen_the_rest()
    if rewriter.quantized:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return Lowered(dict(sorted(rewriter.quantized.items())), rewriter.left_summary())


class _Rewriter:
    def __init__(self, model: ir.Model, scheme: Scheme) -> None:
        self.model = model
        self.scheme = scheme
        self.quantized: collections.Counter[str] = collections.Counter()
        self.left: dict[tuple[str, str], list[int]] = {}
        self._names = FreshNames(model)
        self._made: dict[tuple[str, str], ir.Value] = {}
        self._blocks: dict[tuple[str, str], Once[BlockQuantized]] = {}
        self._panels: dict[str, tuple[str, int]] = {}

    def visit(self, node: ir.Node) -> None:
        weights = sum(
            t.nbytes
            for t in (constant(behind_cast(value)) for value in node.inputs)
            if t is not None and t.size >= MIN_ELEMENTS
        )
        handler = self._handlers().get(node.op_type) if node.domain in ("", "ai.onnx") else None
        try:
            if handler is None or (not weights and node.op_type not in _ALWAYS_COUNTED):
                moves = node.op_type in ("Reshape", "Identity", "Transpose", "Cast")
                if (weights and not moves) or node.op_type in _ALWAYS_COUNTED:
                    raise Leave("no quantized kernel for this operator")
                return
            handler(node)
        except Leave as leave:
            self.left.setdefault((node.op_type, leave.reason), []).append(weights)
        else:
            self.quantized[node.op_type] += 1

    def _handlers(self) -> dict[str, Callable[[ir.Node], None]]:
        return {"MatMul": self._matmul, "Gemm": self._gemm, "Gather": self._gather, "Conv": self._conv}

    def left_summary(self) -> tuple[LeftAlone, ...]:
        rows = sorted(self.left.items())
        return tuple(LeftAlone(op, len(sizes), sum(sizes), reason) for (op, reason), sizes in rows)

    # -- operators ---------------------------------------------------------------------------------------

    def _matmul(self, node: ir.Node) -> None:
        weight = self._matrix(node, transposed=False)
        data = node.inputs[0]
        if data is None:
            raise Leave("no data input")
        self._replace(node, self._multiply(node, data, weight, bias=None))

    def _gemm(self, node: ir.Node) -> None:
        if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1:
            raise Leave("Gemm with transA, alpha or beta")
        weight = self._matrix(node, transposed=bool(attribute(node, "transB", 0)))
        data, bias = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if data is None:
            raise Leave("no data input")
        tensor = constant(bias)
        if bias is None or (tensor is not None and dims_of(tensor) == (weight.n,)):
            self._replace(node, self._multiply(node, data, weight, bias))
            return
        product = self._multiply(node, data, weight, None)
        self._replace(node, product, ir.node("Add", [product.outputs[0], bias], name=f"{node.name}.bias"))

    def _gather(self, node: ir.Node) -> None:
        form = self._block_format("tables need a block scheme")
        table = behind_cast(node.inputs[0])
        tensor = constant(table)
        if table is None or tensor is None:
            raise not_constant(node, 0)
        self._require_weight(tensor)
        if len(tensor.shape) != 2 or attribute(node, "axis", 0) != 0:
            raise Leave("not a table of rows")
        weight = Weight(table, tensor, transposed=True)
        if weight.k % form.block:
            raise Leave(f"rows of {weight.k} are no multiple of the block of {form.block}")
        codes, scales, zeros = self._block_weight(weight, form, flat=True)
        inputs = [codes, node.inputs[1], scales, *([zeros] if zeros else [])]
        attributes = {"bits": form.bits, "block_size": form.block, "gather_axis": 0, "quantize_axis": 1}
        self._replace(
            node, ir.node("GatherBlockQuantized", inputs, attributes, domain=CONTRIB, name=f"{node.name}.quantized")
        )

    def _conv(self, node: ir.Node) -> None:
        if not self.scheme.conv_bits:
            raise Leave(
                "the scheme leaves weights alone"
                if not self.scheme.dynamic
                else "dynamic INT8 convolution is slower than float32 on onnxruntime"
            )
        kernel = behind_cast(node.inputs[1])
        tensor = constant(kernel)
        if kernel is None or tensor is None:
            raise not_constant(node, 1)
        self._require_weight(tensor)
        name = kernel.name or ""
        codes = self._lazy(name, ".int8", ir.DataType.INT8, dims_of(tensor), _channel_codes(tensor, name, 0))
        scales = self._lazy(name, ".scale", ir.DataType.FLOAT, dims_of(tensor)[:1], _channel_scales(tensor, name, 0))
        restore = ir.node("DequantizeLinear", [codes, scales], {"axis": 0}, name=f"{node.name}.weight")
        restore.outputs[0].name = self._names.make(f"{node.name}.weight")
        graph_of(node).insert_before(node, restore)
        node.replace_input_with(1, restore.outputs[0])

    def widen_the_rest(self) -> None:
        """FP16 weights that nothing quantized are stored as the FP32 that the kernels compute with."""
        for node in list(nodes_of(self.model)):
            tensor = constant(node.inputs[0]) if node.op_type == "Cast" and node.inputs else None
            if tensor is None or tensor.dtype != ir.DataType.FLOAT16 or node.outputs[0].dtype != ir.DataType.FLOAT:
                continue
            name = node.inputs[0].name if node.inputs[0] is not None else node.name
            wide = self._lazy(name or "", ".float32", ir.DataType.FLOAT, dims_of(tensor), _as_float(name or "", tensor))
            node.outputs[0].replace_all_uses_with(wide)

    # -- matrices ----------------------------------------------------------------------------------------

    def _multiply(self, node: ir.Node, data: ir.Value, weight: Weight, bias: ir.Value | None) -> ir.Node:
        if self.scheme.dynamic:
            return self._multiply_dynamic(node, data, weight, bias)
        form = self._block_format("the scheme leaves weights alone")
        codes, scales, zeros = self._block_weight(weight, form, flat=False)
        attributes = {
            "K": weight.k, "N": weight.n, "bits": form.bits, "block_size": form.block,
            "accuracy_level": 4,  # INT8 activations inside the kernel: the fast path, 5x one-row float32
        }  # fmt: skip
        inputs = [data, codes, scales, zeros, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        return ir.node("MatMulNBits", inputs, attributes, domain=CONTRIB, name=f"{node.name}.quantized")

    def _multiply_dynamic(self, node: ir.Node, data: ir.Value, weight: Weight, bias: ir.Value | None) -> ir.Node:
        tensor, name, largest = weight.tensor, weight.name, self.scheme.largest_code
        axis = 0 if weight.transposed else 1
        codes = self._lazy(
            name,
            f"{weight.turned}.int8",
            ir.DataType.INT8,
            (weight.k, weight.n),
            _channel_codes(tensor, name, axis, largest, weight.transposed),
        )
        scales = self._lazy(
            name, f"{weight.turned}.scale", ir.DataType.FLOAT, (weight.n,), _channel_scales(tensor, name, axis, largest)
        )
        inputs = [data, codes, scales, *([None, bias] if bias else [])]
        return ir.node("DynamicQuantizeMatMul", inputs, domain=CONTRIB, name=f"{node.name}.quantized")

    def _matrix(self, node: ir.Node, transposed: bool) -> Weight:
        """The constant matrix of a product, looking through a Transpose; raises Leave when there is none."""
        if not self.scheme.matmul_bits and not self.scheme.dynamic:
            raise Leave("the scheme leaves weights alone")
        value = behind_cast(node.inputs[1])
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "Transpose":
            behind = behind_cast(producer.inputs[0])
            if constant(behind) is not None:
                value, transposed = behind, not transposed
        tensor = constant(value)
        if value is None or tensor is None:
            raise not_constant(node, 1)
        self._require_weight(tensor)
        if len(tensor.shape) != 2:
            raise Leave(f"weight with {len(tensor.shape)} dimensions")
        return Weight(value, tensor, transposed)

    def _require_weight(self, tensor: ir.TensorProtocol) -> None:
        require_float(tensor)
        if tensor.size < MIN_ELEMENTS:
            raise Leave(_TOO_SMALL)

    def _block_format(self, otherwise: str) -> BlockFormat:
        if not self.scheme.matmul_bits:
            raise Leave(otherwise)
        return BlockFormat(self.scheme.matmul_bits, self.scheme.block, self.scheme.zero_point)

    # -- tensors that are computed when they are written ----------------------------------------------------

    def _block_weight(
        self, weight: Weight, form: BlockFormat, flat: bool
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes, scales and zero points; `flat` gives Gather's two-dimensional view of the same bytes."""
        n, k, name, turned = weight.n, weight.k, weight.name, weight.turned
        tensor, transposed = weight.tensor, weight.transposed
        if transposed and SLICE in tensor.metadata_props:
            begins, _, whole = tensor.metadata_props[SLICE].partition(" ")
            self._panels[name] = whole, int(begins)
        shared = self._blocks.setdefault(
            (name, turned),
            Once(lambda: quantize_matrix(name, tensor.numpy(), transposed, form), 3 if form.zero_point else 2),
        )
        code_shape: tuple[int, ...] = form.code_shape(n, k)
        table = ".table" if flat else ""
        if flat:
            code_shape = (n, code_shape[1] * code_shape[2])
        codes = self._lazy(
            name,
            f"{turned}.q{form.bits}{table}",
            ir.DataType.UINT8,
            code_shape,
            lambda: shared.get().codes.reshape(code_shape),
            f"{turned}.codes",
        )
        scales = self._lazy(
            name,
            f"{turned}.scale",
            ir.DataType.FLOAT,
            (n, form.blocks(k)),
            lambda: shared.get().scales,
            f"{turned}.scales",
        )
        if not form.zero_point:
            return codes, scales, None
        zeros = self._lazy(
            name,
            f"{turned}.zero",
            ir.DataType.UINT8,
            form.zero_point_shape(n, k),
            lambda: shared.get().zero_points,
            f"{turned}.zeros",
        )
        return codes, scales, zeros

    def _lazy(
        self,
        weight: str,
        suffix: str,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        compute: Callable[[], Any],
        storage: str = "",
    ) -> ir.Value:
        """An initializer of the main graph whose bytes are computed when they are written; made once for each suffix.

        It is named after the weight, by a name that the model has not. Those of one weight with equal `storage` have
        equal bytes.
        """
        if (weight, suffix) in self._made:
            return self._made[weight, suffix]
        name = self._names.make(weight + suffix)
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(compute()), dtype=dtype, name=name),
            dtype=dtype,
            shape=ir.Shape(shape),
            name=name,
            metadata_props=self._stored(weight, storage, math.prod(shape[1:]) * int(dtype.itemsize))
            if storage
            else None,
        )
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
        self.model.graph.register_initializer(value)
        self._made[weight, suffix] = value
        return value

    def _stored(self, weight: str, storage: str, row_bytes: int) -> dict[str, str]:
        """Where the bytes may stand already: rows are quantized each by itself, so a panel's are those of the whole."""
        whole, begins = self._panels.get(weight, (weight, 0))
        props = {STORAGE: f"{storage}:{whole}"}
        return props | {STORAGE_OFFSET: str(begins * row_bytes)} if weight in self._panels else props

    def _replace(self, node: ir.Node, *new: ir.Node) -> None:
        """Put `new` in the place of `node`; the last one's result takes over its name, type and uses."""
        old, result = node.outputs[0], new[-1].outputs[0]
        for step in new[:-1]:
            step.outputs[0].name = self._names.make(f"{step.name}.out")
        result.name, result.type, result.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(graph_of(node), node, [node], list(new), [old], [result])


def _as_float(name: str, tensor: ir.TensorProtocol) -> Callable[[], Any]:
    def compute() -> Any:
        half = tensor.numpy()
        refuse_nan(name, half, half)  # here it has the name that it has in the model
        return half.astype(np.float32)

    return compute


def _channel_codes(
    tensor: ir.TensorProtocol, name: str, axis: int, largest: int = 127, transpose: bool = False
) -> Callable[[], Any]:
    def compute() -> Any:
        codes = quantize_channels(name, tensor.numpy(), axis, largest)[0]
        return codes.T if transpose else codes

    return compute


def _channel_scales(tensor: ir.TensorProtocol, name: str, axis: int, largest: int = 127) -> Callable[[], Any]:
    return lambda: channel_scales(name, tensor.numpy(), axis, largest)
