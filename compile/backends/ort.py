"""onnxruntime on a CPU: load and run models, and observe in a process of their own what they allocate.

Observation needs its own process because an arena is registered once per process, and because memory that was
ever touched would blur the next figure. Run as a module, this file is that process: a JSON request on standard
input, a JSON answer on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from compile.backends import ort_footprint, ort_lowering
from compile.backends.base import Step, Tensors, Trace, one_line
from compile.errors import VerificationError
from compile.graph import ir
from compile.quantize.schemes import Scheme

lower = ort_lowering.lower
weight_footprint = ort_footprint.weight_footprint

# One observed run; a model that needs longer is not going to serve anybody.
OBSERVE_TIMEOUT_S = 3600


def version() -> str:
    """Version of onnxruntime."""
    return str(onnxruntime.__version__)


def session_settings(scheme: Scheme) -> dict[str, str]:  # noqa: ARG001 - part of the Backend protocol
    """Settings that make memory predictable.

    One arena for all sessions holds activations only: weights bypass it, so that the plan's arena is the
    arena. Threads that wait do not spin: the gateway needs the core.
    """
    return {
        "session.use_env_allocators": "1",
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "0",
    }


class OrtModel:
    """A loaded model; `run` takes and gives numpy arrays."""

    def __init__(self, path: Path, options: onnxruntime.SessionOptions) -> None:
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - its exceptions share no base class
            raise VerificationError(f"onnxruntime cannot load {path.name}: {one_line(error)}") from None
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Tensors) -> dict[str, npt.NDArray[Any]]:
        try:
            values = self._session.run(None, dict(inputs))
        except Exception as error:  # noqa: BLE001 - its exceptions share no base class
            raise VerificationError(f"onnxruntime cannot run the model: {one_line(error)}") from None
        return dict(zip(self.outputs, values, strict=True))

    def end_profiling(self) -> Path:
        return Path(self._session.end_profiling())


def load(path: Path, settings: Mapping[str, str]) -> OrtModel:
    """Load for ordinary runs; settings that need a registered arena do not apply here."""
    return OrtModel(path, _options({k: v for k, v in settings.items() if k != "session.use_env_allocators"}))


def _options(settings: Mapping[str, str]) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # its warnings are not for the person who compiles; errors are raised
    for key, value in settings.items():
        options.add_session_config_entry(key, value)
    return options


def observe(path: Path, settings: Mapping[str, str], inputs: Tensors) -> Trace:
    """Run once in its own process with profiling on, and join the kernels with the optimized graph."""
    with tempfile.TemporaryDirectory(prefix="tightfit-observe-") as folder:
        answer = _ask(Path(folder), {"job": "observe", "model": str(path), "settings": dict(settings)}, inputs)
        if "error" in answer:
            raise VerificationError(answer["error"])
        graph = load_graph(Path(answer["optimized"]))
        return _trace(graph, answer["events"], answer["output_nbytes"])


def runs_within(path: Path, settings: Mapping[str, str], inputs: Tensors, arena: int, trace: Trace) -> bool:
    """Run once in its own process, the arena capped; what weights the arena counts stands beside the cap."""
    request = {
        "job": "cap",
        "model": str(path),
        "settings": dict(settings),
        "arena": arena,
        "cap": arena + trace.weights_in_arena,
    }
    with tempfile.TemporaryDirectory(prefix="tightfit-cap-") as folder:
        return "error" not in _ask(Path(folder), request, inputs)


def load_graph(path: Path) -> ir.Model:
    """The optimized graph that onnxruntime saved; its weights are not looked at."""
    return ir.load(path)


def _ask(folder: Path, request: dict[str, Any], inputs: Tensors) -> dict[str, Any]:
    # Strings travel as fixed-width unicode: object arrays would need pickle.
    plain = {k: v.astype(np.str_) if v.dtype == object else v for k, v in inputs.items()}
    np.savez(folder / "inputs.npz", **plain)  # type: ignore[arg-type]
    request = {**request, "folder": str(folder)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "compile.backends.ort"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=OBSERVE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"one run took longer than {OBSERVE_TIMEOUT_S} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"the observing process ended with code {done.returncode}: {last}"}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


# -- the observing process -----------------------------------------------------------------------------------


def _observing_process(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    with np.load(folder / "inputs.npz", allow_pickle=False) as file:
        inputs = {name: file[name] for name in file.files}
    inputs = {k: v.astype(object) if v.dtype.kind == "U" else v for k, v in inputs.items()}
    _register_arena(request.get("arena", 1 << 20), request.get("cap", 0))
    options = _options(request["settings"])
    if request["job"] == "observe":
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        # Weights the optimizer made anew stay out of the graph file, which ends at 2 GiB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        model = OrtModel(Path(request["model"]), options)
        outputs = model.run(inputs)
    except VerificationError as error:
        return {"error": error.message}
    if request["job"] != "observe":
        return {}
    sizes = {name: _nbytes(value) for name, value in outputs.items()}
    return {
        "events": _kernel_events(model.end_profiling()),
        "optimized": str(folder / "optimized.onnx"),
        "output_nbytes": sizes,
    }


def _register_arena(initial: int, cap: int) -> None:
    """One arena whose first chunk is the whole plan: later requests split it, so sizes that vary cannot grow it."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    config = onnxruntime.OrtArenaCfg(
        {
            "max_mem": cap,
            "arena_extend_strategy": 0,  # kNextPowerOfTwo: the only one that honours the first chunk's size
            "initial_chunk_size_bytes": initial,
            "max_dead_bytes_per_chunk": -1,
        }
    )
    onnxruntime.create_and_register_allocator(memory, config)


def _nbytes(value: npt.NDArray[Any]) -> int:
    """Bytes on the wire: strings as the Open Inference Protocol's length-prefixed bytes."""
    if value.dtype != object:
        return int(value.nbytes)
    return sum(4 + len(item if isinstance(item, bytes) else str(item).encode()) for item in value.ravel())


def _kernel_events(profile: Path) -> list[dict[str, Any]]:
    """Kernels in the order they ended: name, operator, bytes of each output, bytes the arena gave."""
    events = [e for e in json.loads(profile.read_text()) if e.get("cat") == "Node" and "output_size" in e["args"]]
    events.sort(key=lambda e: e["ts"] + e["dur"])
    return [
        {
            "name": event["name"].removesuffix("_kernel_time"),
            "op": event["args"]["op_name"],
            "outputs": [_shape_nbytes(shape) for shape in event["args"]["output_type_shape"]],
            # Not reported before onnxruntime 1.32; None then stands for "everything new".
            "allocated": _int(event["args"].get("mem_requested_in_use_delta")),
            "in_use": _int(event["args"].get("mem_bytes_in_use")),
        }
        for event in events
    ]


_ITEMSIZE = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
             "int32": 4, "uint32": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8, "string": 32}  # fmt: skip


def _shape_nbytes(typed_shape: dict[str, list[int]]) -> int:
    total = 0
    for name, shape in typed_shape.items():
        size = _ITEMSIZE.get(name.removeprefix("tensor(").removesuffix(")"), 8)
        for dim in shape:
            size *= dim
        total += size
    return total


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


# -- joining kernels with the graph ----------------------------------------------------------------------------


def _trace(model: ir.Model, events: list[dict[str, Any]], output_nbytes: dict[str, int]) -> Trace:
    """Kernel events know sizes, the optimized graph knows names: join them by node name, in order."""
    waiting: dict[str, list[tuple[ir.Node, bool]]] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        waiting.setdefault(node.name or "", []).append((node, node.graph is not model.graph))
    steps: list[Step] = []
    for event in events:
        known = waiting.get(event["name"]) or []
        # A node in a loop body runs more than once: its last entry stays.
        found = known.pop(0) if len(known) > 1 else (known[0] if known else None)
        steps.append(_step(event, found))
    in_use = events[0]["in_use"] if events else None
    return Trace(tuple(steps), output_nbytes, in_use or 0)


def _step(event: dict[str, Any], found: tuple[ir.Node, bool] | None) -> Step:
    sizes = tuple(event["outputs"])
    allocated = sum(sizes) if event["allocated"] is None else event["allocated"]
    if found is None:
        return Step(event["name"], event["op"], (), (), sizes, allocated, in_subgraph=True)
    node, inner = found
    inputs = tuple(v.name for v in node.inputs if v is not None and v.name)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            # What a body captures is read until the body ends.
            body = attribute.as_graph()
            inputs += tuple(v.name for n in body for v in n.inputs if v is not None and v.name and v.graph is not body)
    outputs = tuple(v.name or "" for v in node.outputs if v.name)
    return Step(event["name"], event["op"], inputs, outputs, sizes, allocated, inner)


if __name__ == "__main__":
    json.dump(_observing_process(json.load(sys.stdin)), sys.stdout)
