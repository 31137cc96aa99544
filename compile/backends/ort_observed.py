"""The process that `ort_observe` observes: it runs all segments, one loaded at a time, in an arena of its own.

A JSON request on standard input, a JSON answer on standard output. The compiler stands beside it in memory, so it
imports onnxruntime, numpy and nothing of onnx.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.backends.ort_session import OrtModel, make_options, register_arena
from compile.errors import VerificationError
from compile.host import give_back

# Where observation starts: the arena then grows as it needs.
FIRST_CHUNK_BYTES = 1 << 20


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    with np.load(Path(request["folder"]) / "inputs.npz", allow_pickle=False) as file:  # noqa: TID251 - our own file
        values = {k: v.astype(object) if v.dtype.kind == "U" else v for k, v in file.items()}
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


if __name__ == "__main__":
    json.dump(_answer(json.load(sys.stdin)), sys.stdout)
