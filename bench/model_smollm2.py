"""SmolLM2-135M (Llama architecture) from its GGUF file to FP32 ONNX with a KV cache, without torch.

Inputs:  input_ids int64[1, t]; past.{layer}.{k,v} float32[1, 3, p, 64] for 30 layers, p may be 0
Outputs: logits float32[t, 49152]; present.{layer}.{k,v} float32[1, 3, p + t, 64]
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from onnx import TensorProto

from bench.onnx_builder import GraphBuilder, value

LAYERS = 30
HIDDEN = 576
HEADS = 9
KV_HEADS = 3
HEAD_DIM = 64
CONTEXT = 2048
VOCABULARY = 49152
ROPE_BASE = 100_000.0
RMS_EPSILON = 1e-5

Floats = NDArray[np.float32]


def convert(gguf: Path, wanted: Path) -> None:
    """Read the GGUF file at `gguf` and write `wanted` and its external data."""
    builder = GraphBuilder(wanted)
    try:
        _Writer(builder, _Weights(gguf)).write()
    except BaseException:
        builder.abandon()
        raise


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write `folder`/tokenizer.json, and generation_config.json beside it, as they are published with the model."""
    fields = GGUFReader(gguf).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == TokenType.CONTROL
        ],
        # llama.cpp names it `smollm`: every digit is a token of its own.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    eos = fields["tokenizer.ggml.eos_token_id"].contents()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    partial = folder / "tokenizer.json.partial"
    partial.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    partial.replace(folder / "tokenizer.json")


class _Weights:
    """The tensors of a GGUF file, dequantized one at a time."""

    def __init__(self, path: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def __getitem__(self, name: str) -> Floats:
        tensor = self._tensors[name]
        # GGUF lists dimensions fastest first, numpy slowest first.
        shape = tensor.shape.tolist()[::-1]
        floats: Floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        return floats


def _unpermute(weight: Floats, heads: int) -> Floats:
    """Undo llama.cpp's interleaving of rotary pairs: our rotation pairs each row with the one half a head away."""
    pairs = weight.reshape(heads, HEAD_DIM // 2, 2, -1)
    restored: Floats = pairs.swapaxes(1, 2).reshape(weight.shape)
    return restored


class _Writer:
    """Emits the layers in order; what all layers share is made in `write`."""

    def __init__(self, builder: GraphBuilder, weights: _Weights) -> None:
        self.g = builder
        self.weights = weights
        self.cos = self.sin = self.mask = ""

    def write(self) -> None:
        g = self.g
        embedding = g.weight(self.weights["token_embd.weight"], "token_embd.weight")
        self._rotary_and_mask()
        x = g.op("Gather", embedding, "input_ids")
        inputs = [value("input_ids", TensorProto.INT64, [1, "t"])]
        outputs = [value("logits", TensorProto.FLOAT, ["t", VOCABULARY])]
        for layer in range(LAYERS):
            x = g.op("Add", x, self._attention(x, layer))
            x = g.op("Add", x, self._feed_forward(x, layer))
            for kind in "kv":
                inputs.append(value(f"past.{layer}.{kind}", TensorProto.FLOAT, [1, KV_HEADS, "p", HEAD_DIM]))
                outputs.append(value(f"present.{layer}.{kind}", TensorProto.FLOAT, [1, KV_HEADS, "p_t", HEAD_DIM]))
        rows = g.op("Reshape", self._norm(x, "output_norm.weight"), g.ints(-1, HIDDEN))
        # The output projection is the embedding once more (tied weights): stored once, used twice.
        g.op("Gemm", rows, embedding, transB=1, out="logits")
        g.save("smollm2-135m", inputs, outputs)

    def _rotary_and_mask(self) -> None:
        """Angles of positions p .. p + t, and a causal mask [t, p + t] that is added to the scores."""
        g = self.g
        frequencies = 1 / ROPE_BASE ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.tile(np.outer(np.arange(CONTEXT), frequencies), 2).astype(np.float32)
        past = g.op("Slice", g.op("Shape", "past.0.k"), g.ints(2), g.ints(3))
        total = g.op("Add", past, g.op("Slice", g.op("Shape", "input_ids"), g.ints(1), g.ints(2)))
        self.cos = g.op("Slice", g.weight(np.cos(angles), "rotary.cos"), past, total, g.ints(0))
        self.sin = g.op("Slice", g.weight(np.sin(angles), "rotary.sin"), past, total, g.ints(0))
        zero, one = g.constant(np.array(0, np.int64)), g.constant(np.array(1, np.int64))
        first, last = g.op("Squeeze", past, g.ints(0)), g.op("Squeeze", total, g.ints(0))
        queries = g.op("Unsqueeze", g.op("Range", first, last, one), g.ints(1))
        keys = g.op("Unsqueeze", g.op("Range", zero, last, one), g.ints(0))
        visible = g.op("LessOrEqual", keys, queries)
        self.mask = g.op("Where", visible, g.scalar(0.0), g.scalar(-1e9))

    def _norm(self, x: str, name: str) -> str:
        """Root mean square normalisation."""
        g = self.g
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes=[-1], keepdims=1)
        scaled = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.scalar(RMS_EPSILON))))
        return g.op("Mul", scaled, g.weight(self.weights[name], name))

    def _linear(self, x: str, name: str, unpermute_heads: int = 0) -> str:
        weight = self.weights[name]
        if unpermute_heads:
            weight = _unpermute(weight, unpermute_heads)
        return self.g.op("MatMul", x, self.g.weight(weight.T, name))

    def _heads(self, x: str, heads: int) -> str:
        """[1, t, heads * 64] -> [1, heads, t, 64]."""
        split = self.g.op("Reshape", x, self.g.ints(0, 0, heads, HEAD_DIM))
        return self.g.op("Transpose", split, perm=[0, 2, 1, 3])

    def _rotate(self, x: str) -> str:
        g = self.g
        low = g.op("Slice", x, g.ints(0), g.ints(HEAD_DIM // 2), g.ints(3))
        high = g.op("Slice", x, g.ints(HEAD_DIM // 2), g.ints(HEAD_DIM), g.ints(3))
        turned = g.op("Concat", g.op("Neg", high), low, axis=3)
        return g.op("Add", g.op("Mul", x, self.cos), g.op("Mul", turned, self.sin))

    def _attention(self, x: str, layer: int) -> str:
        """Grouped-query attention: three query heads share one key and value head."""
        g, block = self.g, f"blk.{layer}."
        y = self._norm(x, block + "attn_norm.weight")
        query = self._rotate(self._heads(self._linear(y, block + "attn_q.weight", HEADS), HEADS))
        key = self._rotate(self._heads(self._linear(y, block + "attn_k.weight", KV_HEADS), KV_HEADS))
        values = self._heads(self._linear(y, block + "attn_v.weight"), KV_HEADS)
        key = g.op("Concat", f"past.{layer}.k", key, axis=2, out=f"present.{layer}.k")
        values = g.op("Concat", f"past.{layer}.v", values, axis=2, out=f"present.{layer}.v")
        query = g.op("Reshape", query, g.ints(1, KV_HEADS, HEADS // KV_HEADS, -1, HEAD_DIM))
        key = g.op("Transpose", g.op("Unsqueeze", key, g.ints(2)), perm=[0, 1, 2, 4, 3])
        scores = g.op("Mul", g.op("MatMul", query, key), g.scalar(HEAD_DIM**-0.5))
        shares = g.op("Softmax", g.op("Add", scores, self.mask), axis=-1)
        mixed = g.op("MatMul", shares, g.op("Unsqueeze", values, g.ints(2)))
        rows = g.op("Transpose", g.op("Reshape", mixed, g.ints(1, HEADS, -1, HEAD_DIM)), perm=[0, 2, 1, 3])
        return self._linear(g.op("Reshape", rows, g.ints(1, -1, HIDDEN)), block + "attn_output.weight")

    def _feed_forward(self, x: str, layer: int) -> str:
        """SwiGLU."""
        g, block = self.g, f"blk.{layer}."
        y = self._norm(x, block + "ffn_norm.weight")
        gate = self._linear(y, block + "ffn_gate.weight")
        gate = g.op("Mul", gate, g.op("Sigmoid", gate))
        return self._linear(g.op("Mul", gate, self._linear(y, block + "ffn_up.weight")), block + "ffn_down.weight")
