"""all-MiniLM-L6-v2 (BERT architecture) from its safetensors file to FP32 ONNX, without torch.

Inputs:  input_ids, attention_mask int64[n, t]
Output:  embedding float32[n, 384], mean over the unmasked tokens, of length 1
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from bench.onnx_builder import GraphBuilder, value

LAYERS = 6
HIDDEN = 384
HEADS = 12
HEAD_DIM = 32

Floats = NDArray[np.float32]


def convert(safetensors: Path, wanted: Path) -> None:
    """Read the safetensors file and write `wanted` and its external data."""
    builder = GraphBuilder(wanted)
    try:
        _Writer(builder, read_safetensors(safetensors)).write()
    except BaseException:
        builder.abandon()
        raise


def read_safetensors(path: Path) -> dict[str, Floats]:
    """The float32 tensors of a safetensors file, mapped, not read. Format: u64 length, JSON header, raw data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    found: dict[str, Floats] = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            start, end = entry["data_offsets"]
            found[name.removeprefix("bert.")] = data[start:end].view(np.float32).reshape(entry["shape"])
    return found


class _Writer:
    def __init__(self, builder: GraphBuilder, weights: dict[str, Floats]) -> None:
        self.g = builder
        self.weights = weights
        self.bias = ""

    def write(self) -> None:
        g = self.g
        words = g.op("Gather", self._weight("embeddings.word_embeddings.weight"), "input_ids")
        # All tokens are of type 0, so its embedding is added to the positions once, here.
        positions = (
            self.weights["embeddings.position_embeddings.weight"]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        length = g.op("Slice", g.op("Shape", "input_ids"), g.ints(1), g.ints(2))
        position = g.op("Slice", g.weight(positions, "embeddings.positions"), g.ints(0), length, g.ints(0))
        x = self._norm(g.op("Add", words, position), "embeddings.LayerNorm")
        mask = g.op("Cast", "attention_mask", to=TensorProto.FLOAT)
        hidden = g.op("Sub", g.op("Unsqueeze", mask, g.ints(1, 2)), g.scalar(1.0))
        self.bias = g.op("Mul", hidden, g.scalar(10_000.0))
        for layer in range(LAYERS):
            x = self._layer(x, f"encoder.layer.{layer}.")
        self._pool(x, mask)
        tokens = [value(name, TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")]
        g.save("minilm", tokens, [value("embedding", TensorProto.FLOAT, ["n", HIDDEN])])

    def _weight(self, name: str) -> str:
        return self.g.weight(self.weights[name], name)

    def _norm(self, x: str, name: str) -> str:
        scale, bias = self._weight(name + ".weight"), self._weight(name + ".bias")
        return self.g.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    def _linear(self, x: str, name: str) -> str:
        weight = self.g.weight(self.weights[name + ".weight"].T, name + ".weight")
        return self.g.op("Add", self.g.op("MatMul", x, weight), self._weight(name + ".bias"))

    def _heads(self, x: str) -> str:
        split = self.g.op("Reshape", x, self.g.ints(0, 0, HEADS, HEAD_DIM))
        return self.g.op("Transpose", split, perm=[0, 2, 1, 3])

    def _layer(self, x: str, block: str) -> str:
        g, attention = self.g, block + "attention.self."
        query, key, values = (self._heads(self._linear(x, attention + n)) for n in ("query", "key", "value"))
        scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = g.op("Add", g.op("Div", scores, g.scalar(HEAD_DIM**0.5)), self.bias)
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        rows = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.ints(0, 0, HIDDEN))
        attended = g.op("Add", self._linear(rows, block + "attention.output.dense"), x)
        x = self._norm(attended, block + "attention.output.LayerNorm")
        y = self._linear(x, block + "intermediate.dense")
        erf = g.op("Erf", g.op("Div", y, g.scalar(2**0.5)))
        gelu = g.op("Mul", g.op("Mul", y, g.scalar(0.5)), g.op("Add", erf, g.scalar(1.0)))
        return self._norm(g.op("Add", self._linear(gelu, block + "output.dense"), x), block + "output.LayerNorm")

    def _pool(self, x: str, mask: str) -> None:
        g = self.g
        total = g.op("ReduceSum", g.op("Mul", x, g.op("Unsqueeze", mask, g.ints(2))), g.ints(1), keepdims=0)
        mean = g.op("Div", total, g.op("ReduceSum", mask, g.ints(1), keepdims=1))
        g.op("Div", mean, g.op("ReduceL2", mean, axes=[1], keepdims=1), out="embedding")
