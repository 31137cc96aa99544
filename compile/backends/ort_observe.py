"""Observe what onnxruntime allocates while it runs a model, and whether a given arena is enough.

That takes a process of its own: an arena is registered once per process, and memory that was ever touched would blur
the next figure. Run as a module, this file is that process: a JSON request on standard input, a JSON answer on
standard output. Segments are loaded one at a time, and what they hand to one another stays in the arena, as in the
agent's engine.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.backends.base import Part, Step, Tensors, Trace
from compile.calibrate.samples import read_npz
from compile.errors import VerificationError
from compile.graph import ir
from compile.host import give_back

# One observed run; a model that needs longer is not going to serve anybody.
OBSERVE_TIMEOUT_S = 3600
# Where observation starts: the arena then grows as it needs.
FIRST_CHUNK_BYTES = 1 << 20


def observe(parts: Sequence[Part], settings: Mapping[str, str], inputs: Tensors, results: Sequence[str]) -> Trace:
    """Run all segments once with profiling on, and join the kernels with the optimized graphs.

    `results` names the model's outputs: they live to the end of the run.
    """
    with tempfile.TemporaryDirectory(prefix="tightfit-observe-") as folder:
        answer = _ask(Path(folder), _request("observe", parts, settings), inputs)
        if "error" in answer:
            raise VerificationError(answer["error"])
        steps: list[Step] = []
        reserved = peak = 0
        for index, (part, seen) in enumerate(zip(parts, answer["parts"], strict=True)):
            steps += _steps(ir.load(Path(seen["optimized"])), seen["events"], part, f"{index}/")
            reserved = max(reserved, seen["reserved"])
            peak = max(peak, _peak(seen["events"]) - seen["reserved"])
        sizes = {name: size for seen in answer["parts"] for name, size in seen["output_nbytes"].items()}
        return Trace(tuple(steps), {name: sizes[name] for name in results if name in sizes}, reserved, peak)


def runs_within(parts: Sequence[Part], settings: Mapping[str, str], inputs: Tensors, arena: int, trace: Trace) -> bool:
    """Run with the arena capped; weights that the arena counts, though it does not hold them, stand beside the cap."""
    request = {**_request("cap", parts, settings), "arena": arena, "cap": arena + trace.weights_in_arena}
    with tempfile.TemporaryDirectory(prefix="tightfit-cap-") as folder:
        return "error" not in _ask(Path(folder), request, inputs)


def _peak(events: Sequence[Mapping[str, Any]]) -> int:
    """Most bytes in use while kernels ran. The arena reports the peak of its whole life, loading and earlier segments
    included, so only a rise after the first kernel is this segment's own."""
    before = events[0]["peak"] if events else 0
    rises = [event["peak"] for event in events if event["peak"] > before]
    return max([event["in_use"] or 0 for event in events] + rises, default=0)


def _request(job: str, parts: Sequence[Part], settings: Mapping[str, str]) -> dict[str, Any]:
    described = [{**dataclasses.asdict(part), "path": str(part.path)} for part in parts]
    return {"job": job, "parts": described, "settings": dict(settings)}


def _ask(folder: Path, request: dict[str, Any], inputs: Tensors) -> dict[str, Any]:
    # Strings travel as fixed-width unicode: object arrays would need pickle.
    plain = {k: v.astype(np.str_) if v.dtype == object else v for k, v in inputs.items()}
    np.savez(folder / "inputs.npz", **plain)  # type: ignore[arg-type]
    request = {**request, "folder": str(folder)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "compile.backends.ort_observe"],
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
    from compile.backends.ort import register_arena  # noqa: PLC0415 - `ort` offers this module's functions

    folder = Path(request["folder"])
    values: dict[str, Any] = read_npz(folder / "inputs.npz")
    values = {k: v.astype(object) if v.dtype.kind == "U" else v for k, v in values.items()}
    register_arena(request.get("arena", FIRST_CHUNK_BYTES), request.get("cap", 0))
    given = set(values)
    answers = []
    try:
        for index, part in enumerate(request["parts"]):
            later = {name for other in request["parts"][index + 1 :] for name in other["inputs"]}
            held = sum(_nbytes(value) for name, value in values.items() if name not in given)
            answers.append(_run_part(request, index, part, values, later, held))
    except VerificationError as error:
        return {"error": error.message}
    return {"parts": answers}


def _run_part(
    request: dict[str, Any], index: int, part: dict[str, Any], values: dict[str, Any], later: set[str], held: int
) -> dict[str, Any]:
    """Load one segment, run it on `values`, leave there what later ones read, and unload it.

    `held` bytes of the arena are taken by what earlier segments made.
    """
    from compile.backends.ort import OrtModel, make_options  # noqa: PLC0415

    options = make_options(request["settings"])
    prefix = f"{request['folder']}/{index:03}"
    if request["job"] == "observe":
        options.enable_profiling = True
        options.profile_file_prefix = f"{prefix}-profile"
        options.optimized_model_filepath = f"{prefix}-optimized.onnx"
    model = OrtModel(Path(part["path"]), options)
    made = model.run_in_arena({name: values[name] for name in part["inputs"]})
    answer: dict[str, Any] = {}
    if request["job"] == "observe":
        events = _kernel_events(model.end_profiling())
        answer = {
            "events": events,
            "reserved": _weights_in_arena(events, held),
            "optimized": f"{prefix}-optimized.onnx",
            "output_nbytes": {name: _nbytes(value) for name, value in made.items()},
        }
    del model
    values.update(made)
    for name in [name for name in values if name not in later]:
        del values[name]
    del made
    give_back()
    return answer


def _weights_in_arena(events: list[dict[str, Any]], held: int) -> int:
    """Bytes of weights that the arena counts: what was in use before the first kernel asked for anything."""
    if not events or events[0]["in_use"] is None:
        return 0
    return max(0, int(events[0]["in_use"]) - int(events[0]["allocated"]) - held)


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
            "peak": _int(event["args"].get("mem_in_use_peak")) or 0,
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


def _steps(model: ir.Model, events: list[dict[str, Any]], part: Part, prefix: str) -> list[Step]:
    """Kernel events know sizes, the optimized graph knows names: join them by node name, in order.

    Names that stay inside the segment get `prefix`: the optimizer makes the same ones in every segment.
    """
    waiting: dict[str, list[tuple[ir.Node, bool]]] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        waiting.setdefault(node.name or "", []).append((node, node.graph is not model.graph))
    outside = {*part.inputs, *part.outputs}
    steps: list[Step] = []
    for event in events:
        known = waiting.get(event["name"]) or []
        # A node in a loop body runs more than once: its last entry stays.
        found = known.pop(0) if len(known) > 1 else (known[0] if known else None)
        step = _step(event, found)
        names = [tuple(n if n in outside else prefix + n for n in group) for group in (step.inputs, step.outputs)]
        steps.append(dataclasses.replace(step, inputs=names[0], outputs=names[1]))
    return steps


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
