"""Small ONNX models, written by hand, and the compiler's steps one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state

from compile.backends import ort
from compile.backends.base import Lowered
from compile.backends.ort_session import saturates
from compile.calibrate.collectors import Collector, Range, Unfit, collect_range, minmax
from compile.calibrate.run import calibrate
from compile.calibrate.synthetic import random_samples
from compile.forms import NORMALIZE
from compile.graph import ir, load_model
from compile.passes.base import run_passes
from compile.passes.normalize import FixNames, RemoveDeadCode, SortNodes
from compile.quantize.schemes import CODE_THAT_FITS, SCHEMES, Scheme
from compile.shapes import bind_shapes, build_contract, parse_shape
from compile.writer import BundleWriter

Array = npt.NDArray[Any]
FLOAT = TensorProto.FLOAT
MINMAX = functools.partial(collect_range, method=minmax)
SCHEME_NAMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.half)
"""Those that onnxruntime executes."""


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def value(name: str, shape: Sequence[int | str | None] | None, element: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def init(name: str, array: Any) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
    ir_version: int = 8,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))


def save(folder: Path, proto: onnx.ModelProto, name: str = "model.onnx") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def external(name: str, dims: Sequence[int], element: int = FLOAT, **entries: object) -> onnx.TensorProto:
    """A tensor whose bytes are said to stand elsewhere: location=, offset=, length=."""
    tensor = TensorProto(name=name, data_type=element, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


def mlp(folder: Path, rows: int | str = 2, k: int = 64, n: int = 96, seed: int = 0) -> Path:
    """`y = relu(x @ w) @ v`, [rows,k] -> [rows,k]."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="relu"),
        node("MatMul", ["b", "v"], ["y"], name="second"),
    ]
    weights = [init("w", normal(k, n, seed=seed)), init("v", normal(n, k, seed=seed + 1))]
    return save(folder, model(nodes, [value("x", [rows, k])], [value("y", [rows, k])], weights))


def prepared(path: Path, *shapes: str) -> ir.Model:
    """The graph as lowering gets it."""
    graph = load_model(path)
    bind_shapes(graph, tuple(map(parse_shape, shapes)))
    run_passes(graph, NORMALIZE)
    return graph


def ranges(
    graph: ir.Model,
    names: Sequence[str],
    path: Path,
    shapes: Sequence[str],
    samples: Sequence[Mapping[str, Array]],
    choose: Callable[[Collector], Range | Unfit] = MINMAX,
) -> dict[str, Range | Unfit]:
    """Ranges over the samples, or over random ones where none are given."""
    dims = bind_shapes(load_model(path), tuple(map(parse_shape, shapes)))
    contract = build_contract(graph, dims, {output.name or "": 0 for output in graph.graph.outputs})
    given = [dict(s) for s in samples] or random_samples(graph, contract, ("opt",) * 8)
    return calibrate(graph, names, lambda: given, choose, ort, path.parent, {}, 1 << 30, path.parent / "scratch")


def lowered(
    path: Path, scheme: str | Scheme, *shapes: str, samples: Sequence[Mapping[str, Array]] = ()
) -> tuple[ir.Model, Lowered]:
    scheme = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    if SATURATES and scheme.dynamic:
        # As for boards with kernels like those of this machine: there is no way to have these products exact.
        scheme = dataclasses.replace(scheme, largest_code=CODE_THAT_FITS)
    graph = prepared(path, *shapes)
    names = ort.prepare(graph, scheme)
    found = ranges(graph, names, path, shapes, samples) if names else {}
    report = ort.lower(graph, scheme, found)
    run_passes(graph, (RemoveDeadCode(), FixNames(), SortNodes()))
    return graph, report


def emit(
    path: Path, scheme: str | Scheme, folder: Path, *shapes: str, samples: Sequence[Mapping[str, Array]] = ()
) -> tuple[Path, Lowered]:
    """Write the graph as a bundle would hold it, without a plan; returns the segment."""
    graph, report = lowered(path, scheme, *shapes, samples=samples)
    name = scheme if isinstance(scheme, str) else scheme.name
    with BundleWriter(folder / f"{name}.tfb", {}) as writer:
        with writer.weights("segments/weights.bin") as sink:
            writer.add_graph("segments/00.onnx", graph, sink, lambda _: None)
        (writer.folder / "segments").rename(folder / name)
    return folder / name / "00.onnx", report


SATURATES = saturates(platform.machine(), Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))


def run(path: Path, inputs: Mapping[str, Array], optimized: bool = False) -> dict[str, Array]:
    """Outputs by name, from onnxruntime with its optimizer off, and products of codes exact as on the board.

    On a machine that saturates, the optimizer is on: it makes such weights uint8. In onnxruntime 1.32 it breaks
    DequantizeLinear without zero points by that; what has those runs as it is.
    """
    if SATURATES:
        with contextlib.suppress(onnxruntime_pybind11_state.Fail):
            return _run(path, inputs, {"session.x64quantprecision": "1"}, optimized=True)
    return _run(path, inputs, {}, optimized)


def _run(path: Path, inputs: Mapping[str, Array], settings: Mapping[str, str], optimized: bool) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in settings.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def relative(reference: Array, other: Array) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(reference - other) / np.linalg.norm(reference))
