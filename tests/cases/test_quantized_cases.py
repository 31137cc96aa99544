"""Operators and weights that broke other quantizers: the same results under every scheme, within its error.

Each was reported against an ONNX tool; the builders make the smallest model that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from compile.backends.base import Lowered
from compile.graph import load_model, weight_nbytes
from tests.cases.forms import samples_of
from tests.support.models import SCHEME_NAMES, emit, init, model, node, normal, relative, run, save, value

LIMITS = {"fp32": 1e-5, "int8-static": 0.05, "int8-dynamic": 0.05, "int8-weights": 0.05, "int4": 0.3}


def recurrent(op: str, gates: int) -> onnx.ModelProto:
    weights = [init("W", normal(1, gates * 16, 40)), init("R", normal(1, gates * 16, 16))]
    layer = node(op, ["x", "W", "R"], ["", "y"], hidden_size=16)
    return model([layer], [value("x", [3, 1, 40])], [value("y", None)], weights)


def transposed_conv(group: int) -> onnx.ModelProto:
    conv = node("ConvTranspose", ["x", "w"], ["y"], group=group, strides=[2, 2])
    return model([conv], [value("x", [1, 16, 5, 5])], [value("y", None)], [init("w", normal(16, 8, 3, 3))])


def masked() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "m"], ["b"]), node("Softmax", ["b"], ["y"])]
    mask = np.zeros((1, 40), np.float32)
    mask[0, ::2] = -np.inf
    mask[0, 1] = -3.4e38
    weights = [init("w", normal(40, 40) / 40), init("m", mask)]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], weights)


def silent_channels() -> onnx.ModelProto:
    kernel = normal(16, 8, 3, 3)
    kernel[3] = 0
    kernel[5] *= 1000
    kernel[6] *= 1e-4
    return model(
        [node("Conv", ["x", "w", "b"], ["y"])], [value("x", [1, 8, 6, 6])], [value("y", None)],
        [init("w", kernel), init("b", normal(16))],
    )  # fmt: skip


def conv_weight_as_input() -> onnx.ModelProto:
    inputs = [value("x", [1, 16, 4, 4]), value("w", [16, 16, 2, 2])]
    return model([node("Conv", ["x", "w"], ["y"])], inputs, [value("y", None)])


# id: (builder, operators that a quantizing scheme must have quantized)
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], set[str]]] = {
    "ConvTranspose": (lambda: transposed_conv(1), set()),
    "grouped ConvTranspose": (lambda: transposed_conv(2), set()),
    "channels far apart or silent": (silent_channels, set()),
    "a mask of infinities": (masked, {"MatMul"}),
    "LSTM": (lambda: recurrent("LSTM", 4), set()),
    "GRU": (lambda: recurrent("GRU", 3), set()),
    "a kernel that is an input": (conv_weight_as_input, set()),
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("case", CASES)
def test_the_results_stay(tmp_path: Path, case: str, scheme: str) -> None:
    build, quantized = CASES[case]
    proto = build()
    path, sample = save(tmp_path, proto), samples_of(proto, seed=10)
    segment, report = emit(path, scheme, tmp_path, samples=[sample])
    expected, found = run(path, sample), run(segment, sample)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        if array.dtype.kind == "f":
            assert relative(array, found[name]) <= LIMITS[scheme]
        else:
            np.testing.assert_array_equal(found[name], array)
    if scheme != "fp32":
        uncalibrated = {left.op for left in report.left if "subgraph" in left.reason}
        assert quantized <= set(report.quantized) | uncalibrated
    assert_accounted(report, path)


def assert_accounted(report: Lowered, path: Path) -> None:
    """Weights are quantized, or left with a reason; none are passed over in silence."""
    if weight_nbytes(load_model(path)) >= 4 * 1024 and not report.quantized:
        assert report.left
    assert all(left.reason for left in report.left)


def test_every_channel_keeps_its_own_precision(tmp_path: Path) -> None:
    path = save(tmp_path, silent_channels())
    sample = {"x": normal(1, 8, 6, 6, seed=4)}
    segment, report = emit(path, "int8-weights", tmp_path)
    assert report.quantized == {"Conv": 1}
    expected, found = run(path, sample)["y"][0], run(segment, sample)["y"][0]
    for channel in range(16):
        assert relative(expected[channel], found[channel]) < 0.03
