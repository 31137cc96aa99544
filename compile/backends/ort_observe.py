"""Observe what onnxruntime allocates while it runs a model, and whether a given arena is enough.

That takes a process of its own (`ort_observed`): an arena is registered once per process, and memory that was ever
touched would blur the next figure. Segments are loaded one at a time, and what they hand to one another stays in the
arena, as in the agent's engine.
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

from compile.backends.base import Part, Step, Tensors, Trace
from compile.errors import VerificationError
from compile.graph import ir
from compile.host import give_back

# One observed run; a model that needs longer is not going to serve anybody.
OBSERVE_TIMEOUT_S = 3600


def observe(parts: Sequence[Part], settings: Mapping[str, str], inputs: Tensors, results: Sequence[str]) -> Trace:
    """Run all segments once with profiling on, and join the kernels with the optimized graphs.

    `results` names the model's outputs: they live to the end of the run.
    """
    give_back()  # the observed process stands beside this one
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
        made = tuple(seen["output_nbytes"] for seen in answer["parts"])
        sizes = {name: size for each in made for name, size in each.items()}
        return Trace(tuple(steps), {name: sizes[name] for name in results if name in sizes}, reserved, peak, made)


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
            [sys.executable, "-m", "compile.backends.ort_observed"],
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
