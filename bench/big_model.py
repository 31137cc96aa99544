"""Generate large transformer-like ONNX models whose weights are hard to quantize: `python -m bench.big_model OUT`.

    python -m bench.big_model big.onnx --size 12GB                 # 12 GB of FP32 parameters
    python -m bench.big_model big16.onnx --size 12GB --dtype float16

Weights are Student-t (6 degrees of freedom) with log-normal row and column scales, and one input channel in a hundred
is 4 to 12 times as large: what activations of real language models make of 4-bit blocks. They are streamed to the
external-data file a few rows at a time, so any size needs about 150 MB of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

PAGE = 4096
CHUNK_VALUES = 1 << 22
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """`layers` blocks of width `hidden` (a multiple of `heads` x 32): 12 x hidden^2 parameters each."""

    hidden: int
    layers: int
    heads: int
    dtype: str

    @property
    def parameters(self) -> int:
        return self.layers * (12 * self.hidden**2 + 13 * self.hidden)

    @property
    def nbytes(self) -> int:
        return self.parameters * np.dtype(self.dtype).itemsize


def shape_for(nbytes: int, dtype: str) -> Shape:
    """The shape of about `nbytes` whose blocks have 0.2 to 1 GB each at large sizes."""
    parameters = nbytes / np.dtype(dtype).itemsize
    hidden = min(4096, max(128, 2 ** int(math.log2(max(parameters / 144, 1)) / 2)))
    layers = max(1, round(parameters / (12 * hidden**2)))
    return Shape(hidden, layers, max(2, hidden // 64), dtype)


class Weights:
    """The external-data file: tensors appended, page-aligned, a chunk at a time."""

    def __init__(self, path: Path, dtype: str, seed: int) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._file = path.open("wb", buffering=0)
        self._rng = np.random.default_rng(seed)
        base = self._rng.standard_t(6, 1 << 23).astype(np.float32)
        self._base = base / base.std()

    def close(self) -> None:
        self._file.close()

    def matrix(self, name: str, rows: int, columns: int, std: float) -> TensorProto:
        """[rows, columns]: windows of the base noise, scaled by row and column, some rows being outliers."""
        rng = self._rng
        row_scale = np.exp(rng.normal(0, 0.25, rows)).astype(np.float32)
        outliers = rng.random(rows) < 0.01
        row_scale[outliers] *= rng.uniform(4, 12, int(outliers.sum()))
        row_scale *= std / np.sqrt((row_scale**2).mean())
        column_scale = np.exp(rng.normal(0, 0.15, columns)).astype(np.float32)
        offset = self._align()
        for start in range(0, rows, max(1, CHUNK_VALUES // columns)):
            part = row_scale[start : start + max(1, CHUNK_VALUES // columns), None]
            count = len(part) * columns
            window = int(rng.integers(0, self._base.size - count))
            values = self._base[window : window + count].reshape(len(part), columns) * part
            values *= column_scale
            self._file.write(values.astype(self.dtype, copy=False).data)
        return _external(name, self.dtype, (rows, columns), self.path.name, offset)

    def vector(self, name: str, values: npt.NDArray[Any]) -> TensorProto:
        return numpy_helper.from_array(values.astype(self.dtype), name)

    def normal(self, mean: float, std: float, size: int) -> npt.NDArray[Any]:
        return mean + std * self._rng.standard_normal(size)

    def _align(self) -> int:
        position = self._file.tell()
        self._file.write(b"\0" * (-position % PAGE))
        return self._file.tell()


def _external(name: str, dtype: np.dtype[Any], dims: tuple[int, int], location: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(dtype), dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    length = dims[0] * dims[1] * dtype.itemsize
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def generate(out: Path, shape: Shape, seed: int = 0) -> None:
    """Write `out` and `out`.data."""
    weights = Weights(out.with_name(out.name + ".data"), shape.dtype, seed)
    initializers = [
        numpy_helper.from_array(np.array([0, 0, shape.heads, shape.hidden // shape.heads], np.int64), "shape_heads"),
        numpy_helper.from_array(np.array([0, 0, shape.hidden], np.int64), "shape_merge"),
        weights.vector("scale", np.array((shape.hidden // shape.heads) ** -0.5)),
    ]
    nodes: list[onnx.NodeProto] = []
    current = "x"
    for layer in range(shape.layers):
        initializers += _block_weights(weights, f"b{layer}.", shape.hidden)
        nodes += _block_nodes(f"b{layer}.", current)
        current = f"b{layer}.out"
    weights.close()
    kind = DTYPES[shape.dtype]
    interface = [helper.make_tensor_value_info(name, kind, ["batch", "rows", shape.hidden]) for name in ("x", current)]
    graph = helper.make_graph(nodes, "big", interface[:1], interface[1:], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), out)


def _block_weights(weights: Weights, p: str, hidden: int) -> Iterator[TensorProto]:
    matrices = (("qkv", hidden, 3 * hidden, 1.0), ("o", hidden, hidden, 0.5), ("up", hidden, 4 * hidden, 1.0),
                ("down", 4 * hidden, hidden, 0.5))  # fmt: skip
    for name, rows, columns, gain in matrices:
        yield weights.matrix(f"{p}{name}.w", rows, columns, gain / math.sqrt(rows))
        yield weights.vector(f"{p}{name}.b", weights.normal(0, 0.02, columns))
    for name in ("ln1", "ln2"):
        yield weights.vector(f"{p}{name}.w", weights.normal(1, 0.1, hidden))
        yield weights.vector(f"{p}{name}.b", weights.normal(0, 0.05, hidden))


def _block_nodes(p: str, x: str) -> list[onnx.NodeProto]:
    """Pre-norm attention and a Gelu feed-forward, as exporters write them."""

    def node(op: str, inputs: list[str], *outputs: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [p + o for o in outputs], name=p + outputs[0], **attributes)

    def linear(name: str, data: str, result: str) -> list[onnx.NodeProto]:
        product = node("MatMul", [data, f"{p}{name}.w"], f"{name}.product")
        return [product, node("Add", [f"{p}{name}.product", f"{p}{name}.b"], result)]

    heads = [
        step
        for c, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        for step in (
            node("Reshape", [p + c, "shape_heads"], f"{c}.heads"),
            node("Transpose", [f"{p}{c}.heads"], f"{c}.t", perm=perm),
        )
    ]
    return [
        node("LayerNormalization", [x, f"{p}ln1.w", f"{p}ln1.b"], "n1", axis=-1),
        *linear("qkv", p + "n1", "qkv"),
        node("Split", [p + "qkv"], "q", "k", "v", axis=-1, num_outputs=3),
        *heads,
        node("MatMul", [p + "q.t", p + "k.t"], "scores"),
        node("Mul", [p + "scores", "scale"], "scaled"),
        node("Softmax", [p + "scaled"], "weights", axis=-1),
        node("MatMul", [p + "weights", p + "v.t"], "context.t"),
        node("Transpose", [p + "context.t"], "context.heads", perm=[0, 2, 1, 3]),
        node("Reshape", [p + "context.heads", "shape_merge"], "context"),
        *linear("o", p + "context", "attention"),
        node("Add", [x, p + "attention"], "middle"),
        node("LayerNormalization", [p + "middle", f"{p}ln2.w", f"{p}ln2.b"], "n2", axis=-1),
        *linear("up", p + "n2", "wide"),
        node("Gelu", [p + "wide"], "gelu"),
        *linear("down", p + "gelu", "narrow"),
        node("Add", [p + "middle", p + "narrow"], "out"),
    ]


def parse_size(text: str) -> int:
    """`12GB`, `500MB`, `3GiB` in bytes."""
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500MB, 12GB or 3GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="model file to write; its weights go beside it")
    parser.add_argument("--size", type=parse_size, default=parse_size("500MB"), help="bytes of parameters, as 12GB")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = shape_for(options.size, options.dtype)
    started = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    generate(options.out, shape, options.seed)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.out}: {shape.layers} blocks of {shape.hidden}, {shape.parameters / 1e9:.2f} G parameters, "
        f"{shape.nbytes / 1e9:.2f} GB in {seconds:.1f} s ({shape.nbytes / 1e9 / seconds:.2f} GB/s), peak {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
