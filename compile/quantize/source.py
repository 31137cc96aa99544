"""What a source model that is quantized already brings: its codes are kept, its scales must make sense."""

from __future__ import annotations

import numpy as np

from compile.errors import ModelError
from compile.graph import constant, ir, nodes_of

# Operator -> inputs that are scales.
_SCALES = {
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
    "QLinearConv": (1, 4, 6),
    "QLinearMatMul": (1, 4, 6),
    "MatMulIntegerToFloat": (2, 3),
    "DynamicQuantizeMatMul": (2,),
    "MatMulNBits": (2,),
}
# The block quantizers' scales are signed: the extreme of a block takes the code without a counterpart.
_SIGNED = ("MatMulNBits",)


def check_scales(model: ir.Model) -> None:
    """Raise ModelError that names a constant scale which is NaN, infinite, zero, negative or denormal.

    The ONNX checker and onnxruntime accept such models, and answer with NaN or zeros.
    """
    for node in nodes_of(model):
        for at in _SCALES.get(node.op_type, ()):
            value = node.inputs[at] if at < len(node.inputs) else None
            tensor = _constant(value)
            if tensor is None or value is None:
                continue
            scales = tensor.numpy().astype(np.float64)
            if node.op_type in _SIGNED:
                scales = np.abs(scales)
            bad = scales[~(np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny))]
            if bad.size:
                raise ModelError(
                    f"{node.op_type} node {node.name!r}: {bad.size} of {scales.size} scales in {value.name!r} are "
                    f"no scales, the first is {bad.flat[0]:g}",
                    "a scale is finite and above zero; quantize the model again",
                )


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        return producer.attributes["value"].as_tensor()
    return constant(value)
