"""Small bundles made by hand: onnx graphs, and a manifest with a plan that holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from msgspec import UNSET
from onnx import TensorProto, helper

from targets.arena import Arena
from targets.budget import MemoryPlan, Phase, Sweep, Term
from targets.bundle import (
    MANIFEST,
    SCHEMA,
    FileEntry,
    Manifest,
    Quantization,
    Residency,
    SampleTensor,
    Segment,
    Source,
    Verification,
    dumps,
    file_sha256,
    read_manifest,
    sealed,
)
from targets.tensor import Contract, DimRange, DType, Padding, TensorSpec
from targets.windows import Join, Split

MIB = 1 << 20
ONNX_TYPES: dict[DType, int] = {
    DType.BOOL: TensorProto.BOOL,
    DType.UINT8: TensorProto.UINT8,
    DType.INT8: TensorProto.INT8,
    DType.UINT16: TensorProto.UINT16,
    DType.INT16: TensorProto.INT16,
    DType.UINT32: TensorProto.UINT32,
    DType.INT32: TensorProto.INT32,
    DType.UINT64: TensorProto.UINT64,
    DType.INT64: TensorProto.INT64,
    DType.FLOAT16: TensorProto.FLOAT16,
    DType.FLOAT32: TensorProto.FLOAT,
    DType.FLOAT64: TensorProto.DOUBLE,
    DType.STRING: TensorProto.STRING,
}
"""Every type that both the protocol and numpy have."""


def value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, ONNX_TYPES[spec.dtype], list(spec.shape))


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "test",
        [value_info(spec) for spec in inputs],
        [value_info(spec) for spec in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def plan_of(
    contract: Contract,
    slots: int = 2,
    residencies: Sequence[Residency] = (Residency.HEAP,),
    sizes: Sequence[int] = (0,),
    **terms: int,
) -> MemoryPlan:
    """A plan of modest terms, in bytes, for segments whose weights have these `sizes`; `terms` replaces some of them in
    every phase."""
    inputs = sum(spec.max_nbytes for spec in contract.inputs)
    slot = sum(-(-size // 64) * 64 for sizes in contract.places for size in sizes)
    fixed = {"runtime": 150 * MIB, "weights": max(sum(sizes), MIB)}
    counted = {
        **fixed,
        "activations": MIB,
        "io_slots": max(slot, 64) * slots,
        "bodies": 2 * sum(spec.max_nbytes for spec in contract.whole.inputs) * slots,
        **({"answers": contract.answer_bytes * slots} if contract.split else {}),
        **({"batch": inputs} if contract.batch_rows and slots > 1 else {}),
        **terms,
    }
    streamed = tuple(step for step, each in enumerate(residencies) if each is Residency.STREAMED)
    places = [[sizes[step] for step in streamed][start::2] for start in (0, 1)]
    passing = sum(sum(place) for place in places if len(place) > 1)
    if streamed:
        counted["mapped_weights"] = sum(sizes)
        counted["ring"] = sum(max(place, default=0) for place in places)
        counted["waiting"] = (slots - 1) * MIB
    kinds = {"weights": "file", "mapped_weights": "file", "io_slots": "shared", "ring": "shared"}
    run = tuple(Term(name, kinds.get(name, "anonymous"), nbytes) for name, nbytes in counted.items())
    loading = tuple(term for term in run if term.name in (*fixed, "tokenizer"))
    phases = [Phase("load", loading), Phase("run", run)]
    return MemoryPlan(
        budget_bytes=max(3400 * MIB, sum(counted.values())),
        slots=slots,
        phases=tuple([Phase("finalise", loading), *phases] if residencies[0].needs_finalise else phases),
        arena=Arena(height=0, lower_bound=0, alignment=64, buffers=()),
        sweep=Sweep(streamed, tuple(sizes), passing, 0, 0) if streamed else None,
    )


def write_bundle(
    folder: Path,
    segments: Sequence[onnx.ModelProto],
    contract: Contract,
    sample: Mapping[str, np.ndarray[Any, Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write a bundle; `changes` replaces fields of its manifest. Tensors of 1 KiB and more are external data."""
    (folder / "segments").mkdir(parents=True)
    for index, model in enumerate(segments):
        _write_segment(folder, f"{index:02d}", model)
    samples = []
    for position, (name, array) in enumerate((sample or {}).items()):
        (folder / "sample").mkdir(exist_ok=True)
        file = f"sample/{position}.bin"
        (folder / file).write_bytes(array.tobytes())
        samples.append(SampleTensor(name, array.shape, file))
    manifest = Manifest(
        schema=SCHEMA,
        name=folder.stem,
        target="test-board",
        runtime="onnxruntime",
        source=Source("test.onnx", "0" * 64, "0" * 64),
        contract=contract,
        segments=tuple(_segment(f"segments/{index:02d}.onnx", model) for index, model in enumerate(segments)),
        plan=plan_of(contract),
        quantization=Quantization("none", {}, (), 0, 0),
        verification=Verification("random", 0, ()),
        sample=tuple(samples),
        assets=(),
        options={},
        tools={},
        files=(),
    )
    return rewrite(folder, manifest, **changes)


def rewrite(folder: Path, manifest: Manifest, **changes: Any) -> Path:
    """Write the manifest, sealed, with some fields replaced and the digests of the files as they now are."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    files = tuple(FileEntry(name, (folder / name).stat().st_size, file_sha256(folder / name)) for name in names)
    manifest = sealed(msgspec.structs.replace(manifest, **{"files": files, **changes}))
    (folder / MANIFEST).write_bytes(dumps(manifest))
    return folder


def _write_segment(folder: Path, name: str, model: onnx.ModelProto) -> None:
    onnx.save(
        model,
        str(folder / "segments" / f"{name}.onnx"),
        save_as_external_data=True,
        location=f"{name}.bin",
        size_threshold=1024,
    )


def _segment(file: str, model: onnx.ModelProto) -> Segment:
    return Segment(file, tuple(i.name for i in model.graph.input), tuple(o.name for o in model.graph.output))


def dense(name: str, dtype: DType, *shape: int | str, largest: int | None = None) -> TensorSpec:
    """A specification whose size follows from its shape; `largest` elements where dimensions have names."""
    count = largest if largest is not None else int(np.prod([int(size) for size in shape], dtype=np.int64))
    itemsize = 64 if dtype is DType.STRING else dtype.bits // 8
    return TensorSpec(name, dtype, shape, count * itemsize)


# --- bundles that tests share


def identity(folder: Path, dtype: DType, shape: tuple[int, ...] = (2, 3), slots: int = 2) -> Path:
    """`y = x`."""
    x, y = dense("x", dtype, *shape), dense("y", dtype, *shape)
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [x], [y])
    contract = Contract((x,), (y,), {})
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def every_type(folder: Path) -> Path:
    """One pair `in_T`, `out_T` per element type, each [2,3]; all are needed in a request."""
    inputs = [dense(f"in_{dtype.oip}", dtype, 2, 3) for dtype in ONNX_TYPES]
    outputs = [dense(f"out_{dtype.oip}", dtype, 2, 3) for dtype in ONNX_TYPES]
    nodes = [helper.make_node("Identity", [i.name], [o.name]) for i, o in zip(inputs, outputs, strict=True)]
    return write_bundle(folder, [model_of(nodes, inputs, outputs)], Contract(tuple(inputs), tuple(outputs), {}))


def add(folder: Path, slots: int = 2) -> Path:
    """`total = a + b`, `scaled = total * weight` over FP32[batch,8]; weight is external, in a segment of its own."""
    a, b = (dense(name, DType.FLOAT32, "batch", 8, largest=32) for name in "ab")
    total, scaled = (dense(name, DType.FLOAT32, "batch", 8, largest=32) for name in ("total", "scaled"))
    weight = np.tile(np.arange(8, dtype=np.float32), (64, 1))
    first = model_of([helper.make_node("Add", ["a", "b"], ["total"])], [a, b], [total])
    second = model_of(
        [
            helper.make_node("Gather", ["weight", "row"], ["used"], axis=0),
            helper.make_node("Mul", ["total", "used"], ["scaled"]),
        ],
        [total],
        [scaled],
        {"weight": weight, "row": np.array([0], np.int64)},
    )
    contract = Contract((a, b), (total, scaled), {"batch": DimRange(1, 1, 4)})
    sample = {"a": np.ones((1, 8), np.float32), "b": np.ones((1, 8), np.float32)}
    return write_bundle(folder, [first, second], contract, sample, plan=plan_of(contract, slots))


def adding(folder: Path, slots: int = 2) -> Path:
    """`y` = the sum of `x`, FP32[1,2]: the model of the examples in docs/streams.md."""
    x, y = dense("x", DType.FLOAT32, 1, 2), dense("y", DType.FLOAT32, 1, 1)
    model = model_of(
        [helper.make_node("MatMul", ["x", "ones"], ["y"])], [x], [y], {"ones": np.ones((2, 1), np.float32)}
    )
    contract = Contract((x,), (y,), {})
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def slow(folder: Path, slots: int = 2, longest: int = 0) -> Path:
    """FP32 `y = x` after `turns` (INT64[1], up to 10^7) empty turns of a loop: takes as long as the request says. x has
    4 values, or with `longest` any number up to it, in windows of 4."""
    size = "t" if longest else 4
    x, turns = dense("x", DType.FLOAT32, size, largest=4), dense("turns", DType.INT64, 1)
    y = dense("y", DType.FLOAT32, size, largest=4)
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in ("state", "state_out")]
    condition = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "go_out")]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_out"]), helper.make_node("Identity", ["state"], ["state_out"])],
        "turn",
        [helper.make_tensor_value_info("turn", TensorProto.INT64, []), condition[0], state[0]],
        [condition[1], state[1]],
    )
    nodes = [
        helper.make_node("Squeeze", ["turns"], ["count"]),
        helper.make_node("Loop", ["count", "yes", "x"], ["y"], body=body),
    ]
    model = model_of(nodes, [x, turns], [y], {"yes": np.array(True)})
    dims, split = ({"t": DimRange(1, 4, 4)}, Split("t", 4, 0, longest, (Join(0),))) if longest else ({}, UNSET)
    contract = Contract((x, turns), (y,), dims, split=split)
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def log_of(folder: Path) -> Path:
    """`y = log(x)` over FP32[1,8]: NaN below zero, -infinity at zero."""
    x, y = dense("x", DType.FLOAT32, 1, 8), dense("y", DType.FLOAT32, 1, 8)
    model = model_of([helper.make_node("Log", ["x"], ["y"])], [x], [y])
    return write_bundle(folder, [model], Contract((x,), (y,), {}))


def growing(folder: Path, slots: int = 2) -> Path:
    """`y` has as many zeros as `n` says; the plan has room for 16."""
    n, y = dense("n", DType.INT64, 1), dense("y", DType.FLOAT32, "many", largest=16)
    model = model_of([helper.make_node("ConstantOfShape", ["n"], ["y"])], [n], [y])
    contract = Contract((n,), (y,), {})
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def picking(folder: Path, slots: int = 8, batch: str | None = "n") -> Path:
    """Of rows that may be put together: `picked` = table[at] + x over FP32[n,8] with at INT64[n] below 16, else the run
    fails; `company` INT64[n] says of each row how many were computed with it; `most` FP32[n,8] is no row of its own."""
    x, at = dense("x", DType.FLOAT32, "n", 8, largest=64), dense("at", DType.INT64, "n", largest=8)
    outputs = (
        dense("picked", DType.FLOAT32, "n", 8, largest=64),
        dense("company", DType.INT64, "n", largest=8),
        dense("most", DType.FLOAT32, "n", 8, largest=64),
    )
    nodes = [
        helper.make_node("Gather", ["table", "at"], ["row"]),
        helper.make_node("Add", ["row", "x"], ["picked"]),
        helper.make_node("Shape", ["at"], ["count"]),
        helper.make_node("Expand", ["count", "count"], ["company"]),
        helper.make_node("ReduceMax", ["x", "first"], ["most"]),
    ]
    table = np.arange(128, dtype=np.float32).reshape(16, 8)
    model = model_of(nodes, [x, at], outputs, {"table": table, "first": np.array([0], np.int64)})
    contract = Contract((x, at), outputs, {"n": DimRange(1, 1, 8)}, batch)
    sample: dict[str, np.ndarray[Any, Any]] = {"x": np.ones((1, 8), np.float32), "at": np.array([3], np.int64)}
    return write_bundle(folder, [model], contract, sample, plan=plan_of(contract, slots))


def masked(folder: Path, slots: int = 4) -> Path:
    """Of rows that may be put together and padded along t, in buckets of 4 and 8: `next` = x + 1 over FP32[n,t], `sum`
    FP32[n] is that of x where mask FP32[n,t] is 1; `longest` INT64[n] is the t that it was computed with."""
    x, mask = (dense(name, DType.FLOAT32, "n", "t", largest=32) for name in ("x", "mask"))
    outputs = (
        dense("next", DType.FLOAT32, "n", "t", largest=32),
        dense("sum", DType.FLOAT32, "n", largest=4),
        dense("longest", DType.INT64, "n", largest=4),
    )
    nodes = [
        helper.make_node("Add", ["x", "one"], ["next"]),
        helper.make_node("Mul", ["x", "mask"], ["counted"]),
        helper.make_node("ReduceSum", ["counted", "last"], ["sum"], keepdims=0),
        helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
        helper.make_node("Shape", ["x"], ["t"], start=1, end=2),
        helper.make_node("Expand", ["t", "n"], ["longest"]),
    ]
    model = model_of(nodes, [x, mask], outputs, {"one": np.ones(1, np.float32), "last": np.array([1], np.int64)})
    dims = {"n": DimRange(1, 1, 4), "t": DimRange(1, 8, 8, (4, 8))}
    contract = Contract((x, mask), outputs, dims, "n", pad=Padding("t", (1, None, None)))
    return write_bundle(folder, [model], contract, plan=plan_of(contract, slots))


def chain(
    folder: Path,
    residencies: Sequence[Residency],
    layers: int = 1,
    width: int = 256,
    int4: bool = False,
    slots: int = 2,
    batch: str | None = None,
    **changes: Any,
) -> Path:
    """One segment per residency, `layers` products with a [width,width] weight in each; FP32[rows,width] in and out.

    The products are float32 MatMul, or MatMulNBits (4 bits, blocks of 32).
    """
    rng = np.random.default_rng(0)
    names = ["x", *(f"cut{step}" for step in range(1, len(residencies))), "y"]
    specs = [dense(name, DType.FLOAT32, "rows", width, largest=4 * width) for name in names]
    models = []
    for step, (start, end) in enumerate(itertools.pairwise(specs)):
        nodes, weights, value = [], {}, start.name
        for layer in range(layers):
            weight, product = f"w{step}.{layer}", f"p{step}.{layer}"
            made = end.name if layer == layers - 1 else f"h{step}.{layer}"
            if int4:
                weights[weight] = rng.integers(0, 256, (width, width // 32, 16), np.uint8)
                weights[f"{weight}.scales"] = rng.random(width * width // 32, np.float32) / width
                attributes: dict[str, Any] = {"K": width, "N": width, "bits": 4, "block_size": 32, "accuracy_level": 4}
                inputs = [value, weight, f"{weight}.scales"]
                nodes.append(helper.make_node("MatMulNBits", inputs, [product], domain="com.microsoft", **attributes))
            else:
                weights[weight] = rng.standard_normal((width, width), np.float32) / np.float32(np.sqrt(width))
                nodes.append(helper.make_node("MatMul", [value, weight], [product]))
            nodes.append(helper.make_node("Tanh", [product], [made]))
            value = made
        model = model_of(nodes, [start], [end], weights)
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        models.append(model)
    contract = Contract((specs[0],), (specs[-1],), {"rows": DimRange(1, 1, 4)}, batch)
    sample = {"x": np.ones((1, width), np.float32)}
    write_bundle(folder, models, contract, sample)
    manifest = read_manifest(folder)
    placed = zip(manifest.segments, residencies, strict=True)
    segments = tuple(msgspec.structs.replace(segment, residency=residency) for segment, residency in placed)
    sizes = [(folder / segment.file).with_suffix(".bin").stat().st_size for segment in segments]
    plan = plan_of(contract, slots, residencies, sizes)
    return rewrite(folder, manifest, **{"segments": segments, "plan": plan, **changes})
