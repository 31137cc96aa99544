"""What the agent answers under a board's memory limit, beside what the uncompiled source model says.

The source model may be larger than this machine: it runs in a process of its own, under a memory limit that the kernel
enforces, with its weights mapped from their file, link by link: `python -m bench.large_answers SOURCE IN.npz OUT.npz`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from compile.backends.base import Model
from compile.backends.ort import load_mapped
from compile.forms import SOURCE_FORM, link_limit
from compile.graph import load_model
from compile.host import give_back
from compile.limits import Limit, limited
from compile.partition.graph import extract, positions, segments, static_sizes
from compile.partition.greedy import cut
from compile.passes.base import run_passes
from compile.passes.widen import holds_half
from compile.serving import finalise_command, needs_finalise, serve_command, started
from compile.shapes import bind_shapes, parse_shape
from compile.sizes import segment_limit
from compile.verify import Comparison
from targets.bundle import Manifest, read_manifest
from targets.tensor import parse_size

Array = npt.NDArray[Any]
ROWS = (1, 5, 16)
# The compiler draws its samples from small seeds.
SEED = 20_000
TIMEOUT_S = 3600.0


def questions(hidden: int, dtype: str) -> list[Array]:
    """Inputs [1, rows, hidden] of `ROWS` rows each, standard normal, none of which the compiler has seen."""
    shapes = [(1, rows, hidden) for rows in ROWS]
    return [np.random.default_rng(SEED + s[1]).standard_normal(s, np.float32).astype(dtype) for s in shapes]


def compare_answers(source: Path, bundle: Path, host_memory: int, max_error: float) -> dict[str, Any]:
    """Ask the agent and the source model; what `judge` says, and the limits under which both ran."""
    manifest = read_manifest(bundle)
    spec = manifest.contract.inputs[0]
    asked = questions(int(spec.shape[-1]), spec.dtype.numpy or "")
    answers, agent = served(bundle, manifest, asked)
    expected, reference = referenced(source, asked, host_memory, bundle.parent)
    return {**judge(expected, answers, max_error), "agent": agent, "reference": reference}


def judge(expected: Sequence[Array], answers: Sequence[Array], max_error: float) -> dict[str, Any]:
    """Errors by input, [1, rows, hidden] each, and whether the largest relative L2 is within `max_error`."""
    inputs = []
    for reference, answer in zip(expected, answers, strict=True):
        comparison = Comparison(f"of {reference.shape[1]} rows")
        comparison.add(reference, answer)
        error = comparison.result()
        inputs.append(
            {
                "rows": reference.shape[1],
                "relative_l2": error.relative_l2,
                "max_abs": error.max_abs,
                "equal_argmax": error.top1_agreement,
            }
        )
    verdict = "within" if all(each["relative_l2"] <= max_error for each in inputs) else "over"
    return {"inputs": inputs, "max_error": max_error, "verdict": verdict}


def served(bundle: Path, manifest: Manifest, asked: Sequence[Array]) -> tuple[list[Array], dict[str, Any]]:
    """Answers of the real agent, finalised and run under the budget of the bundle's board, and what that limit was."""
    with (
        tempfile.TemporaryDirectory(prefix=".tightfit-answers-", dir=bundle.parent) as name,
        limited(manifest.plan.budget_bytes) as limit,
    ):
        folder = Path(name)
        cache = folder / "finalised" if needs_finalise(manifest) else None
        if cache:
            with started(finalise_command(bundle, cache), limit, folder) as finalising:
                finalising.wait_end(TIMEOUT_S)
        with started(serve_command(bundle, folder, cache, TIMEOUT_S), limit, folder) as service:
            service.wait_ready(TIMEOUT_S)
            return [ask(service.url, manifest, x) for x in asked], _described(limit)


def ask(url: str, manifest: Manifest, x: Array) -> Array:
    """The output for one input, both sent as binary tensors."""
    spec, out = manifest.contract.inputs[0], manifest.contract.outputs[0]
    sent = {"name": spec.name, "datatype": spec.dtype.oip, "shape": x.shape}
    inputs = [{**sent, "parameters": {"binary_data_size": x.nbytes}}]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    try:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection.request("POST", f"/v2/models/{manifest.name}/infer", head + x.tobytes(), headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            sys.exit(f"the agent answered {response.status}: {body[:300].decode(errors='replace')}")
        size = int(response.headers["Inference-Header-Content-Length"])
    finally:
        connection.close()
    shape = json.loads(body[:size])["outputs"][0]["shape"]
    answer: Array = np.frombuffer(body[size:], out.dtype.numpy).reshape(shape)
    return answer


def referenced(
    source: Path, asked: Sequence[Array], host_memory: int, folder: Path
) -> tuple[list[Array], dict[str, Any]]:
    """Answers of the source model, from a process that is limited to `host_memory`, and what that limit was."""
    with tempfile.TemporaryDirectory(prefix=".tightfit-reference-", dir=folder) as name:
        given, made = Path(name) / "in.npz", Path(name) / "out.npz"
        np.savez(given, *asked)
        command = [sys.executable, "-m", "bench.large_answers", str(source), str(given), str(made)]
        with limited(host_memory) as limit:
            done = subprocess.run(
                limit.command([*command, "--host-memory", str(host_memory)]),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no word"])[-1]
                sys.exit(f"the source model's process ended with {done.returncode}: {why}")
            described = _described(limit)
        with np.load(made) as answers:
            return [answers[key] for key in answers.files], described


def _described(limit: Limit) -> dict[str, Any]:
    charged = limit.charged()
    peak = charged.peak if charged else None
    return {"limit_bytes": limit.nbytes, "mechanism": limit.mechanism, "peak_bytes": peak, "kills": limit.oom_kills()}


def run_source(source: Path, asked: Sequence[Array], host_memory: int) -> list[Array]:
    """The source model's one output for each input of its one input.

    onnxruntime without optimizations, no kernel copies a weight. FP16 weights are widened, a link's at a time: the
    runtime does that in front of everything else, so links are cut as the compiler cuts them.
    """
    rows, hidden = max(x.shape[1] for x in asked), asked[0].shape[2]
    form, largest = load_model(source), load_model(source)
    name = form.graph.inputs[0].name
    bind_shapes(form, (parse_shape(f"{name}=1,1..{rows},{hidden}"),))
    bind_shapes(largest, (parse_shape(f"{name}=1,{rows},{hidden}"),))
    run_passes(form, SOURCE_FORM)
    run_passes(largest, SOURCE_FORM)
    values: list[dict[str, Array]] = [{name or "": x} for x in asked]
    (output,) = form.graph.outputs
    limit = link_limit(segment_limit(host_memory), holds_half(form))
    parts = segments(form, cut(positions(form, static_sizes(largest)), limit))
    run_in_turn(parts, lambda part: load_mapped(extract(form, part), source.parent), values, {output.name or ""})
    return [known[output.name or ""] for known in values]


class Takes(Protocol):
    """A part of a model that says which values it reads."""

    @property
    def inputs(self) -> tuple[str, ...]: ...


Part = TypeVar("Part", bound=Takes)


def run_in_turn(
    parts: Sequence[Part], load: Callable[[Part], Model], values: Sequence[dict[str, Array]], wanted: Collection[str]
) -> None:
    """Run one part after the other, each in memory for its turn only, on every set of values, in place; what neither a
    later part reads nor anybody wanted is forgotten."""
    for at, part in enumerate(parts):
        loaded = load(part)
        read_later = {*wanted, *(name for later in parts[at + 1 :] for name in later.inputs)}
        for known in values:
            known.update(loaded.run({name: known[name] for name in part.inputs}))
            for name in known.keys() - read_later:
                del known[name]
        del loaded
        give_back()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("given", type=Path, help="inputs, .npz")
    parser.add_argument("made", type=Path, help="answers in the same order, .npz")
    parser.add_argument("--host-memory", type=parse_size, default=parse_size("1GiB"))
    options = parser.parse_args()
    with np.load(options.given) as given:
        asked = [given[key] for key in given.files]
    np.savez(options.made, *run_source(options.source, asked, options.host_memory))


if __name__ == "__main__":
    main()
