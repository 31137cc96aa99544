"""The three models that the benchmark of the scheduler serves: random weights, FP32 `x` in, `y` out, axis 0 `batch`.

mobilenet   as good as all of its time is arithmetic: a batch of 8 takes nearly 8 times as long as one
dense       most of its time is the reading of weights: a batch of 16 takes little longer than one
tiny        takes no time: what is measured is everything else
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from bench.onnx_builder import GraphBuilder, value

BATCH = "batch"


@dataclass(frozen=True)
class ServedModel:
    """Shapes without the batch axis, and the largest batch that is served."""

    name: str
    shape: tuple[int, ...]
    output: tuple[int, ...]
    max_batch: int
    build: Callable[[GraphBuilder], str]

    def write(self, folder: Path) -> Path:
        """The ONNX file, made there."""
        path = folder / f"{self.name}.onnx"
        graph = GraphBuilder(path)
        graph.op("Identity", self.build(graph), out="y")
        x = value("x", TensorProto.FLOAT, [BATCH, *self.shape])
        y = value("y", TensorProto.FLOAT, [BATCH, *self.output])
        graph.save(self.name, [x], [y])
        return path

    def sample(self, rows: int = 1) -> npt.NDArray[np.float32]:
        """Standard normal, always the same."""
        return np.random.default_rng(0).standard_normal((rows, *self.shape), np.float32)


def _mobilenet(graph: GraphBuilder) -> str:
    """MobileNetV2 (Sandler et al., 2018, table 2) with batch normalization folded into the convolutions."""
    random = np.random.default_rng(1)

    def convolve(at: str, inputs: int, filters: int, size: int, stride: int = 1, group: int = 1) -> str:
        taken = inputs // group
        weight = random.standard_normal((filters, taken, size, size), np.float32) * np.sqrt(2 / (taken * size * size))
        name = graph.weight(weight.astype(np.float32), f"w{len(weights)}")
        weights.append(name)
        pads = [size // 2] * 4
        return graph.op("Conv", at, name, strides=[stride] * 2, pads=pads, group=group, kernel_shape=[size] * 2)

    def relu6(at: str) -> str:
        return graph.op("Clip", at, graph.scalar(0), graph.scalar(6))

    weights: list[str] = []
    at, channels = relu6(convolve("x", 3, 32, 3, stride=2)), 32
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, filters, count, first_stride in table:
        for number in range(count):
            stride, wide, start = (first_stride if number == 0 else 1), channels * expansion, at
            if expansion > 1:
                at = relu6(convolve(at, channels, wide, 1))
            at = convolve(relu6(convolve(at, wide, wide, 3, stride, group=wide)), wide, filters, 1)
            if number:
                at = graph.op("Add", start, at)
            channels = filters
    at = graph.op("GlobalAveragePool", relu6(convolve(at, channels, 1280, 1)))
    return graph.op("MatMul", graph.op("Flatten", at), _matrix(graph, random, 1280, 1000))


def _dense(layers: int, width: int) -> Callable[[GraphBuilder], str]:
    def build(graph: GraphBuilder) -> str:
        random = np.random.default_rng(2)
        at = "x"
        for _ in range(layers):
            at = graph.op("Tanh", graph.op("MatMul", at, _matrix(graph, random, width, width)))
        return at

    return build


def _matrix(graph: GraphBuilder, random: Any, rows: int, columns: int) -> str:
    weight = random.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
    return graph.weight(weight, f"matrix{random.bit_generator.random_raw()}")


MOBILENET = ServedModel("mobilenet", (3, 224, 224), (1000,), 8, _mobilenet)
DENSE = ServedModel("dense", (4096,), (4096,), 16, _dense(2, 4096))
TINY = ServedModel("tiny", (64,), (64,), 16, _dense(1, 64))
