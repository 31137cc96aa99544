"""What onnxruntime would fuse around a float convolution, done before its inputs and outputs get codes.

Between quantized operators the runtime's own fusions find nothing any more: each would be a kernel of its own, on
floats. So what follows a convolution channel by channel goes into its weights, and padding in front of it into its
attributes. The graph computes what it did before.

    Pad, Conv or MaxPool                   Conv or MaxPool with pads
    Conv, BatchNormalization               Conv
    Conv, Mul|Div|Add|Sub by a constant    Conv, where the constant has one value, or one for each channel
    HardSigmoid behind a convolution       Conv, Clip to 0..1
    ReduceMean over height and width       GlobalAveragePool
    x * (1 + Erf(x / sqrt 2)) / 2          com.microsoft Gelu
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from compile.backends.ort_rewrite import (
    CONTRIB,
    Constants,
    attribute,
    behind_cast,
    graph_of,
    ints,
    is_op,
    scalar,
    sole_reader,
    take_over,
)
from compile.calibrate.collectors import LARGEST
from compile.graph import constant, dims_of, ir

Floats = npt.NDArray[np.float64]


def fuse(model: ir.Model) -> None:
    """Rewrite the main graph in place, as far as it goes."""
    constants = Constants(model)
    for node in list(model.graph):
        if is_op(node, "ReduceMean"):
            _average(node)
        elif is_op(node, "Erf") and _gelu(node):
            model.graph.opset_imports.setdefault(CONTRIB, 1)
    for node in list(model.graph):
        if is_op(node, "Conv", "MaxPool"):
            _fold_padding(node)
        if is_op(node, "Conv"):
            _fold_channels(constants, node)


# -- in front -----------------------------------------------------------------------------------------------


def _fold_padding(conv: ir.Node) -> None:
    """Pads with what the operator itself pads with: zeros, or in front of MaxPool what is below all values."""
    pad = conv.inputs[0].producer() if conv.inputs[0] is not None else None
    if pad is None or pad.op_type != "Pad" or pad.domain != "" or attribute(conv, "auto_pad", "NOTSET") != "NOTSET":
        return
    amounts, data = _padding(pad, is_op(conv, "MaxPool")), pad.inputs[0]
    if amounts is None or data is None:
        return
    rank = len(amounts) // 2
    own = ints(conv, "pads") or [0] * (2 * (rank - 2))
    if any(amounts[axis] for axis in (0, 1, rank, rank + 1)) or min(amounts) < 0 or len(own) != 2 * (rank - 2):
        return
    together = [a + b for a, b in zip(own, amounts[2:rank] + amounts[rank + 2 :], strict=True)]
    conv.attributes["pads"] = ir.AttrInt64s("pads", together)
    conv.replace_input_with(0, data)


def _padding(pad: ir.Node, lowest: bool) -> list[int] | None:
    """Begins and ends of a Pad whose amounts are constant and whose fill is zero, or the lowest value; else None."""
    fill = constant(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else None
    computed = len(pad.inputs) > 3 or (len(pad.inputs) > 2 and pad.inputs[2] is not None and fill is None)
    if attribute(pad, "mode", "constant") != "constant" or computed:
        return None
    number = 0.0 if fill is None else float(fill.numpy().reshape(-1)[0])
    amounts = constant(pad.inputs[1])
    if amounts is None or (number > -LARGEST if lowest else number != 0):
        return None
    return [int(amount) for amount in amounts.numpy()]


# -- behind -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _PerChannel:
    """y = scale * x + shift, each [channels]; what remains to be done behind it is `rest`."""

    scale: Floats
    shift: Floats
    rest: str = ""


def _fold_channels(constants: Constants, conv: ir.Node) -> None:
    weight = behind_cast(conv.inputs[1])
    tensor = constant(weight)
    has_bias = len(conv.inputs) > 2 and conv.inputs[2] is not None
    bias = constant(behind_cast(conv.inputs[2])) if has_bias else None
    if tensor is None or weight is None or (has_bias and bias is None) or not _is_float(tensor):
        return
    channels = dims_of(tensor)[0]
    scale = np.ones(channels)
    shift = np.zeros(channels) if bias is None else bias.numpy().astype(np.float64)
    folded = False
    while True:
        follower = sole_reader(conv.outputs[0])
        step = _per_channel(follower, conv.outputs[0], channels) if follower is not None else None
        if follower is None or step is None:
            break
        scale, shift, folded = scale * step.scale, shift * step.scale + step.shift, True
        _replace(constants, follower, conv, step.rest)
    if not folded:
        return
    if (scale != 1).any():
        factors = scale.reshape(-1, *[1] * (len(tensor.shape) - 1))
        made = constants.add_lazy(
            f"{weight.name}.folded",
            ir.DataType.FLOAT,
            dims_of(tensor),
            lambda: (tensor.numpy() * factors).astype(np.float32),
        )
        conv.replace_input_with(1, made)
    folded_bias = constants.add(f"{conv.name}.bias", shift.astype(np.float32))
    conv.resize_inputs(3)
    conv.replace_input_with(2, folded_bias)


def _is_float(tensor: ir.TensorProtocol) -> bool:
    return tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def _per_channel(node: ir.Node, value: ir.Value, channels: int) -> _PerChannel | None:
    """What a node does to each channel, if that is all it does."""
    ones, zeros = np.ones(channels), np.zeros(channels)
    if is_op(node, "BatchNormalization"):
        return _normalization(node)
    if is_op(node, "HardSigmoid"):
        alpha, beta = float(attribute(node, "alpha", 0.2)), float(attribute(node, "beta", 0.5))
        return _PerChannel(ones * alpha, ones * beta, "Clip")
    if not is_op(node, "Mul", "Add", "Sub", "Div"):
        return None
    first = node.inputs[0] is value
    other = _of_channels(node.inputs[1 if first else 0], value, channels)
    if other is None or (node.op_type == "Div" and not (first and other.all())):
        return None
    steps = {
        "Mul": _PerChannel(other, zeros),
        "Add": _PerChannel(ones, other),
        "Sub": _PerChannel(ones, -other) if first else _PerChannel(-ones, other),
    }
    return _PerChannel(1 / other, zeros) if node.op_type == "Div" else steps[node.op_type]


def _normalization(node: ir.Node) -> _PerChannel | None:
    if attribute(node, "training_mode", 0):
        return None
    parameters = [constant(behind_cast(value)) for value in node.inputs[1:5]]
    if any(parameter is None for parameter in parameters):
        return None
    gain, offset, mean, variance = (p.numpy().astype(np.float64) for p in parameters if p is not None)
    scale = gain / np.sqrt(variance + float(attribute(node, "epsilon", 1e-5)))
    return _PerChannel(scale, offset - mean * scale)


def _of_channels(other: ir.Value | None, value: ir.Value, channels: int) -> Floats | None:
    """[channels] float64 of a constant that broadcasts along the channel axis alone; None for any other operand."""
    tensor = constant(behind_cast(other))
    if tensor is None or not _is_float(tensor) or value.shape is None:
        return None
    rank, dims = len(value.shape), dims_of(tensor)
    if len(dims) > rank or tensor.size not in (1, channels):
        return None
    padded = (1,) * (rank - len(dims)) + dims
    if tensor.size != 1 and padded[1] != channels:
        return None
    return np.broadcast_to(tensor.numpy().astype(np.float64).reshape(-1), channels)


def _replace(constants: Constants, follower: ir.Node, conv: ir.Node, rest: str) -> None:
    """Let the convolution make the follower's result, but for what `rest` still does."""
    result, made = follower.outputs[0], conv.outputs[0]
    if rest:
        bounds = [constants.add(f"{result.name}.{end}", np.float32(bound)) for end, bound in (("low", 0), ("high", 1))]
        clip = ir.node(rest, [made, *bounds], name=f"{follower.name}.clip")
        take_over(follower, [clip], clip.outputs[0])
        return
    name, shape = result.name, result.shape
    ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
    graph_of(follower).remove(follower, safe=True)
    made.name, made.shape = name, shape


# -- pooling ------------------------------------------------------------------------------------------------


def _average(node: ir.Node) -> None:
    """Mean over all but the first two axes, which are kept: that is GlobalAveragePool, which has an INT8 kernel."""
    data = node.inputs[0]
    if data is None or data.shape is None or not attribute(node, "keepdims", 1):
        return
    rank = len(data.shape)
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = ints(node, "axes") or ([int(axis) for axis in given.numpy().reshape(-1)] if given is not None else [])
    if rank > 3 and sorted(axis % rank for axis in axes) == list(range(2, rank)):
        pool = ir.node("GlobalAveragePool", [data], name=f"{node.name}.pool")
        take_over(node, [pool], pool.outputs[0])


# -- activation ---------------------------------------------------------------------------------------------


def _gelu(erf: ir.Node) -> bool:
    """Replace the five operators around an Erf by Gelu, where they are that. The runtime would see it too, but not
    behind codes, where it gives each reader of a value a value of its own."""
    inner = erf.inputs[0].producer() if erf.inputs[0] is not None else None
    one = sole_reader(erf.outputs[0])
    if inner is None or sole_reader(inner.outputs[0]) is not erf or one is None or not is_op(one, "Add"):
        return False
    data, slope = _times_scalar(inner)
    added = [scalar(value) for value in one.inputs if value is not erf.outputs[0]]
    if data is None or added != [1.0] or not math.isclose(slope, math.sqrt(0.5), rel_tol=1e-4):
        return False
    factors = {"data": 0, "half": 0}
    taken, last = [inner, erf, one], one
    while factors != {"data": 1, "half": 1}:
        node = sole_reader(last.outputs[0])
        if node is None or not is_op(node, "Mul"):
            return False
        other = node.inputs[1 if node.inputs[0] is last.outputs[0] else 0]
        before = other.producer() if other is not None else None
        if other is data:
            factors["data"] += 1
        elif scalar(other) == 0.5:
            factors["half"] += 1
        elif before is not None and sole_reader(before.outputs[0]) is node and _times_scalar(before) == (data, 0.5):
            factors = {key: count + 1 for key, count in factors.items()}
            taken.append(before)
        else:
            return False
        if max(factors.values()) > 1:
            return False
        taken.append(node)
        last = node
    taken.remove(last)
    gelu = ir.node("Gelu", [data], domain=CONTRIB, name=f"{last.name}.gelu")
    take_over(last, [gelu], gelu.outputs[0])
    graph_of(gelu).remove(taken, safe=True)
    return True


def _times_scalar(node: ir.Node) -> tuple[ir.Value | None, float]:
    """(x, c) of a node that computes x * c or x / (1 / c); x is None for all others."""
    first, second = node.inputs[0], node.inputs[1] if len(node.inputs) == 2 else None
    if is_op(node, "Div") and scalar(second):
        return first, 1 / (scalar(second) or 1)
    if is_op(node, "Mul"):
        for value, number in ((first, scalar(second)), (second, scalar(first))):
            if number is not None:
                return value, number
    return None, 0.0
