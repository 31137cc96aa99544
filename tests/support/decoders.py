"""A small language model, made as exporters make them: two layers, a KV cache, a tokenizer of bytes and some merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from targets.generation import TOKENIZER, Generation, tokenizer_bytes
from targets.states import State, Sum
from targets.tensor import Contract, DimRange, DType
from tests.support.bundles import dense, model_of, plan_of, write_bundle

LAYERS, HEADS, WIDTH = 2, 2, 8
HIDDEN = HEADS * WIDTH
LONGEST, PIECE = 48, 4
"""What the past may have, and tokens of one run."""
SHAPES = (f"input_ids=1,1..{PIECE}", f"past_key_values.*=1,{HEADS},0..{LONGEST},{WIDTH}")
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("o", "n"), ("r", "e")]
EOS = 0


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    found = {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    return [found[byte] for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Token 0 ends a text, 1 to 256 are the bytes, then what is merged."""
    return {text: number for number, text in enumerate(["<|end|>", *byte_characters(), *(a + b for a, b in MERGES)])}


def write_tokenizer(folder: Path, eos: int | None = EOS) -> Path:
    """tokenizer.json, and generation_config.json beside it."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": EOS, "content": "<|end|>", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary(),
            "merges": [list(pair) for pair in MERGES],
        },
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return path


def write_decoder(path: Path, seed: int = 0) -> Path:
    """input_ids int64[1,t], attention_mask int64[1,past + t], position_ids int64[1,t], past_key_values.N.key and .value
    float32[1,2,past,8]; logits float32[1,t,265], present.N.key and .value."""
    tokens = len(vocabulary())
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray[Any, Any]] = {}

    def op(kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(array: Any) -> str:
        name = f"c{len(weights)}"
        weights[name] = np.array(array)
        return name

    def matrix(rows: int, columns: int, scale: float = 1.0) -> str:
        return constant((rng.standard_normal((rows, columns)) * scale / np.sqrt(rows)).astype(np.float32))

    def heads(value: str) -> str:
        return op("Transpose", op("Reshape", value, constant([0, 0, HEADS, WIDTH])), perm=[0, 2, 1, 3])

    embedding = constant(rng.standard_normal((tokens, HIDDEN)).astype(np.float32))
    places = constant(rng.standard_normal((LONGEST + PIECE, HIDDEN)).astype(np.float32))
    x = op("Add", op("Gather", embedding, "input_ids"), op("Gather", places, "position_ids"))
    # What is masked, and what is to come, is not seen: [1, 1, t, past + t].
    total = op("Shape", "attention_mask", start=1, end=2)
    zero, one = constant(np.int64(0)), constant(np.int64(1))
    keys = op("Range", zero, op("Squeeze", total), one)
    seen = op("LessOrEqual", keys, op("Unsqueeze", "position_ids", constant([2])))
    asked = op("Cast", op("Unsqueeze", "attention_mask", constant([1])), to=TensorProto.BOOL)
    mask = op("Where", op("And", seen, asked), constant(np.float32(0)), constant(np.float32(-1e9)))
    mask = op("Unsqueeze", mask, constant([1]))
    ids = [("input_ids", [1, "t"]), ("attention_mask", [1, "past + t"]), ("position_ids", [1, "t"])]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in ids]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "t", tokens])]
    for layer in range(LAYERS):
        query, key, value = (heads(op("MatMul", x, matrix(HIDDEN, HIDDEN, 3.0))) for _ in range(3))
        for kind, new in (("key", key), ("value", value)):
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            op("Concat", past, new, axis=2, out=present)
            shape = [1, HEADS, "past", WIDTH]
            inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, shape))
            outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, [1, HEADS, "past + t", WIDTH]))
        turned = op("Transpose", f"present.{layer}.key", perm=[0, 1, 3, 2])
        scores = op("Mul", op("MatMul", query, turned), constant(np.float32(WIDTH**-0.5)))
        mixed = op("MatMul", op("Softmax", op("Add", scores, mask), axis=-1), f"present.{layer}.value")
        rows = op("Reshape", op("Transpose", mixed, perm=[0, 2, 1, 3]), constant([0, 0, HIDDEN]))
        x = op("Add", x, op("Tanh", op("MatMul", rows, matrix(HIDDEN, HIDDEN))))
    op("MatMul", x, matrix(HIDDEN, tokens, 4.0), out="logits")
    graph = helper.make_graph(
        nodes, "decoder", inputs, outputs, [onnx.numpy_helper.from_array(a, name) for name, a in weights.items()]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def write_generating(folder: Path, model: onnx.ModelProto, contract: Contract, slots: int) -> Path:
    """A bundle of a language model with the tokenizer from above."""
    (folder / "assets").mkdir(parents=True)
    write_tokenizer(folder / "assets", eos=None)
    plan = plan_of(contract, slots, tokenizer=tokenizer_bytes((folder / TOKENIZER).stat().st_size))
    generation = Generation(TOKENIZER, (EOS,))
    return write_bundle(folder, [model], contract, assets=(TOKENIZER,), generation=generation, plan=plan)


def decoder(folder: Path, slots: int = 2, seed: int = 0) -> Path:
    """A bundle of `write_decoder`'s model."""
    model = onnx.load(write_decoder(folder.with_suffix(".onnx"), seed))
    past = [
        dense(f"past_key_values.{layer}.{kind}", DType.FLOAT32, 1, HEADS, "past", WIDTH, largest=HIDDEN * LONGEST)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    ]
    both = LONGEST + PIECE
    names = [each.name.replace("past_key_values", "present") for each in past]
    present = [dense(name, DType.FLOAT32, 1, HEADS, "all", WIDTH, largest=HIDDEN * both) for name in names]
    contract = Contract(
        (
            dense("input_ids", DType.INT64, 1, "t", largest=PIECE),
            dense("attention_mask", DType.INT64, 1, "all", largest=both),
            dense("position_ids", DType.INT64, 1, "t", largest=PIECE),
            *past,
        ),
        (dense("logits", DType.FLOAT32, 1, "t", len(vocabulary()), largest=PIECE * len(vocabulary())), *present),
        {"t": DimRange(1, PIECE, PIECE), "past": DimRange(0, LONGEST, LONGEST), "all": DimRange(1, both, both)},
        states=tuple(State(into.name, name, 2) for into, name in zip(past, names, strict=True)),
        sums=(Sum("all", ("past", "t")),),
    )
    return write_generating(folder, model, contract, slots)


def recurrent(folder: Path, slots: int = 2) -> Path:
    """A model whose state keeps its shape, so that a text may go on and on: h = tanh(h + embedding[last token])."""
    rng = np.random.default_rng(1)
    count = len(vocabulary())
    ids, h = dense("input_ids", DType.INT64, 1, "t", largest=PIECE), dense("h", DType.FLOAT32, 1, HIDDEN)
    logits = dense("logits", DType.FLOAT32, 1, count)
    weights = {
        "embedding": rng.standard_normal((count, HIDDEN)).astype(np.float32),
        "out": (rng.standard_normal((HIDDEN, count)) * 2).astype(np.float32),
        "last": np.array([-1], np.int64),
        "axis": np.array([1], np.int64),
        # The end is never the most likely.
        "never": np.where(np.arange(count) == EOS, -1e9, 0).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["input_ids", "last"], ["new"], axis=1),
        helper.make_node("Gather", ["embedding", "new"], ["rows"]),
        helper.make_node("Squeeze", ["rows", "axis"], ["row"]),
        helper.make_node("Add", ["row", "h"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["h_next"]),
        helper.make_node("MatMul", ["h_next", "out"], ["scored"]),
        helper.make_node("Add", ["scored", "never"], ["logits"]),
    ]
    outputs = (logits, dense("h_next", DType.FLOAT32, 1, HIDDEN))
    contract = Contract((ids, h), outputs, {"t": DimRange(1, PIECE, PIECE)}, states=(State("h", "h_next"),))
    return write_generating(folder, model_of(nodes, [ids, h], outputs, weights), contract, slots)


def summing(folder: Path, slots: int = 3) -> Path:
    """A model with state and without text: `y` = 10 times the sum of all `x` FP32[1,2] of a sequence."""
    x, h, y, left = (dense(name, DType.FLOAT32, 1, 2) for name in ("x", "h", "y", "h_next"))
    nodes = [helper.make_node("Add", ["x", "h"], ["h_next"]), helper.make_node("Mul", ["h_next", "ten"], ["y"])]
    contract = Contract((h, x), (left, y), {}, states=(State("h", "h_next"),))
    model = model_of(nodes, [h, x], [left, y], {"ten": np.float32(10)})
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """So many tokens that follow, each the most likely, by onnxruntime alone."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    past = {
        f"past_key_values.{layer}.{kind}": np.zeros((1, HEADS, 0, WIDTH), np.float32)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    made: list[int] = []
    new, length = list(prompt), 0
    while len(made) < count:
        feeds = {
            "input_ids": np.array([new], np.int64),
            "attention_mask": np.ones((1, length + len(new)), np.int64),
            "position_ids": np.arange(length, length + len(new), dtype=np.int64)[None],
        }
        logits, *present = session.run(None, feeds | past)
        length += len(new)
        past = dict(zip(past, present, strict=True))
        new = [int(logits[0, -1].argmax())]
        made += new
    return made
