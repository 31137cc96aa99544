"""Whether the number of segments shows in the answers: `python -m bench.segment_counts`.

    python -m bench.segment_counts --scheme int4 --save                  # SmolLM2-135M
    python -m bench.segment_counts --big 12GB --scheme int4 --save       # a generated decoder, 12 GB of FP32 parameters

The model is compiled once for each number of segments and each bundle is compared with that of one segment, on the same
inputs at the lower, usual and upper ends of all ranges, in two ways. Bare: segment by segment in this process, weights
mapped, no kernel laying them out and no operator fused; every bit must be equal. Served: by the real agent under the
board's budget, as a client sees it; the relative L2 must stay below `TOLERANCE`, because operators that a cut separates
are not fused. Exit code 1: one of them did not hold.

Compiling takes --host-memory where the number of segments allows it, else twice that, and so on; the table says what it
was. Bundles are deleted one after the other, only their outputs are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.big_model import generate, shape_for
from bench.large_answers import run_in_turn
from bench.machine import describe_machine, measured_on
from bench.models import fetch
from compile.backends.base import Model
from compile.backends.ort import load_mapped
from compile.calibrate.samples import Sample
from compile.calibrate.synthetic import corners, random_samples
from compile.errors import OptionError
from compile.graph import load_model
from compile.host import give_back
from compile.limits import limited
from compile.options import Options
from compile.pipeline import compile_model
from compile.serving import finalise_command, needs_finalise, serve_command, started
from compile.shapes import ShapeRequest, bind_shapes, contract_inputs, parse_shape
from compile.verify import Comparison
from targets.board import load_board
from targets.bundle import Manifest, Segment
from targets.errors import TightfitError
from targets.tensor import Contract, human, parse_size

RESULTS = Path(__file__).parent / "results" / "segment_counts"
BOARD = "raspberry-pi-5-4gb"
MODEL_SHAPES = {"smollm2-135m": ["input_ids=1,1..16..64", "past.0.k=1,3,0..64..256,64"]}
BIG_ROWS = "1..5..16"
COUNTS = (1, 2, 5, 20)
TOLERANCE = {"fp32": 1e-5, "int4": 1e-2}
"""Relative L2 of what is served, beside one segment. Kernels on four bits round their input to eight, so that a
difference in the last bit of a float can become one of a whole step."""
# Bytes of a bundle for each byte of FP32 weights; what is laid out on the board is as much once more.
BUNDLE_SHARE = {"fp32": 1.02, "int4": 0.2}
MOST_HOST_MEMORY = 64 << 30
TIMEOUT_S = 3600.0


def run(
    source: Path, shapes: Sequence[str], scheme: str, counts: Sequence[int], host_memory: int, folder: Path
) -> dict[str, Any]:
    """The figures of every number of segments, the first of `counts` being what the others are compared with."""
    requests = tuple(map(parse_shape, shapes))
    samples = samples_of(source, requests)
    options = Options(scheme=scheme, shapes=requests, name=source.stem)
    rows: list[dict[str, Any]] = []
    expected: tuple[list[Sample], list[Sample]] | None = None
    for count in counts:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            bundle = Path(name) / "counted.tfb"
            began = time.monotonic()
            manifest, needed = compiled(source, bundle, dataclasses.replace(options, segments=count), host_memory)
            seconds = time.monotonic() - began
            found = bare(bundle, manifest, samples), served(bundle, manifest, samples, Path(name))
        expected = expected or found
        rows.append(
            {
                "segments": len(manifest.segments),
                "residency": ", ".join(sorted({segment.residency.value for segment in manifest.segments})),
                "host_memory": needed,
                "compile_s": round(seconds, 1),
                "bare": compared(expected[0], found[0]),
                "served": compared(expected[1], found[1]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        del found
        give_back()
    return {"scheme": scheme, "shapes": list(shapes), "tolerance": TOLERANCE[scheme], "rows": rows}


def samples_of(source: Path, shapes: tuple[ShapeRequest, ...]) -> list[Sample]:
    """Seeded random inputs of the source model, at the corners of its ranges."""
    model = load_model(source)
    dims = bind_shapes(model, shapes)
    return random_samples(model, Contract(contract_inputs(model, dims), (), dims), corners(dims))


def compiled(source: Path, bundle: Path, options: Options, host_memory: int) -> tuple[Manifest, int]:
    """The bundle's manifest, and the host memory that it took: doubled until so few segments can be made in it."""
    while True:
        try:
            chosen = dataclasses.replace(options, host_memory=host_memory)
            return compile_model(source, load_board(BOARD), bundle, chosen), host_memory
        except OptionError:
            host_memory *= 2
            if host_memory > MOST_HOST_MEMORY:
                raise


def bare(bundle: Path, manifest: Manifest, samples: Sequence[Sample]) -> list[Sample]:
    """All outputs for each sample, one segment in memory at a time, nothing laid out anew and nothing fused."""
    values = [dict(sample) for sample in samples]
    wanted = {spec.name for spec in manifest.contract.outputs}

    def load(segment: Segment) -> Model:
        path = bundle / segment.file
        return load_mapped(load_model(path), path.parent)

    run_in_turn(manifest.segments, load, values, wanted)
    return [{name: known[name] for name in wanted} for known in values]


def served(bundle: Path, manifest: Manifest, samples: Sequence[Sample], folder: Path) -> list[Sample]:
    """The agent's outputs for each sample, finalised and run under the budget of the board."""
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(limited(manifest.plan.budget_bytes))
        cache = folder / "finalised" if needs_finalise(manifest) else None
        if cache:
            with started(finalise_command(bundle, cache), limit, folder) as finalising:
                finalising.wait_end(TIMEOUT_S)
        service = stack.enter_context(started(serve_command(bundle, folder, cache, TIMEOUT_S), limit, folder))
        service.wait_ready(TIMEOUT_S)
        return [ask(service.url, manifest, sample) for sample in samples]


def ask(url: str, manifest: Manifest, sample: Sample) -> Sample:
    """All outputs for one request, binary tensors both ways."""
    given = [(spec, np.ascontiguousarray(sample[spec.name])) for spec in manifest.contract.inputs]
    inputs = [
        {
            "name": spec.name,
            "datatype": spec.dtype.oip,
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for spec, array in given
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(array.tobytes() for _, array in given)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection.request("POST", f"/v2/models/{manifest.name}/infer", body, headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            sys.exit(f"the agent answered {response.status}: {data[:300].decode(errors='replace')}")
    at = int(response.headers["Inference-Header-Content-Length"])
    types = {spec.name: np.dtype(spec.dtype.numpy) for spec in manifest.contract.outputs}
    outputs: Sample = {}
    for output in json.loads(data[:at])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = np.frombuffer(data[at : at + size], types[output["name"]]).reshape(output["shape"])
        at += size
    return outputs


def compared(expected: Sequence[Sample], found: Sequence[Sample]) -> dict[str, Any]:
    """Whether all bits of all outputs are equal, and the relative L2 of the worst output."""
    equal, worst = True, 0.0
    for name in expected[0]:
        comparison = Comparison(name)
        for reference, other in zip(expected, found, strict=True):
            comparison.add(reference[name], other[name])
            equal &= reference[name].tobytes() == other[name].tobytes()
        worst = max(worst, comparison.result().relative_l2)
    return {"equal_bits": equal, "relative_l2": worst}


def holds(figures: Mapping[str, Any]) -> bool:
    """Whether every number of segments gave what it must."""
    return all(
        row["bare"]["equal_bits"] and row["served"]["relative_l2"] <= figures["tolerance"] for row in figures["rows"]
    )


def report(saved: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures for people."""
    lines = [
        "# The number of segments, and the answers",
        "",
        f"Bundles for `{BOARD}` beside that of one segment, the same inputs at the lower, usual and upper ends of all",
        "ranges. Bare: segment by segment, no weights laid out anew, no operators fused; all bits must be equal.",
        "Served: by the real agent under the board's budget, with both; relative L2 of the worst output.",
        "Made by `python -m bench.segment_counts`.",
        "",
        "| model | scheme | segments | weights | host memory | compile, s | bare | served: relative L2 | tolerance |",
        "|---|---|---:|---|---:|---:|---|---:|---:|",
    ]
    for name, figures in saved.items():
        for row in figures["rows"]:
            bare_bits = "equal bits" if row["bare"]["equal_bits"] else f"**{row['bare']['relative_l2']:.2g}**"
            lines.append(
                f"| {name.partition(', ')[0]} | {figures['scheme']} | {row['segments']} | {row['residency']} "
                f"| {human(row['host_memory'])} | {row['compile_s']} | {bare_bits} "
                f"| {'equal bits' if row['served']['equal_bits'] else format(row['served']['relative_l2'], '.2g')} "
                f"| {figures['tolerance']:g} |"
            )
    return "\n".join([*lines, "", *dict.fromkeys(measured_on(each["machine"]) for each in saved.values()), ""])


def save(name: str, figures: Mapping[str, Any]) -> None:
    """Put one model's figures beside those of the others."""
    path = RESULTS.with_suffix(".json")
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved[name] = {"machine": describe_machine("onnxruntime", "numpy"), **figures}
    saved = dict(sorted(saved.items()))
    path.write_text(json.dumps(saved, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(report(saved))


def check_disk(folder: Path, generated: int, weights: int, scheme: str) -> None:
    """Say what the disk must hold at once: the model, where it is generated, a bundle, and its laid-out files."""
    needed = generated + int(2 * weights * BUNDLE_SHARE[scheme]) + (1 << 30)
    free = shutil.disk_usage(folder).free
    print(f"needs {human(needed)} of free disk, {human(free)} are free", flush=True)
    if free < needed:
        sys.exit(f"{folder} has too little room: give another with --folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", choices=sorted(MODEL_SHAPES), default="smollm2-135m")
    which.add_argument("--big", metavar="SIZE", help="generate a decoder with so many bytes of FP32 parameters instead")
    parser.add_argument("--scheme", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of segments; one must be first")
    parser.add_argument("--host-memory", default="1GiB", help="what compiling may take where it is enough")
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder")
    parser.add_argument("--save", action="store_true", help="put the figures into bench/results/segment_counts")
    options = parser.parse_args()
    counts = [int(text) for text in options.counts.split(",")]
    if counts[0] != 1:
        parser.error("--counts must begin with 1, which the others are compared with")
    try:
        with tempfile.TemporaryDirectory(prefix="tightfit-counts-", dir=options.folder) as name:
            folder = Path(name)
            if options.big:
                shape = shape_for(parse_size(options.big), "float32")
                check_disk(folder, shape.nbytes, shape.nbytes, options.scheme)
                source, shapes = folder / "big.onnx", [f"x=1,{BIG_ROWS},{shape.hidden}"]
                generate(source, shape)
            else:
                source, shapes = fetch(options.model), MODEL_SHAPES[options.model]
                check_disk(folder, 0, source.with_name(f"{source.name}.data").stat().st_size, options.scheme)
            host_memory = parse_size(options.host_memory)
            figures = run(source, shapes, options.scheme, counts, host_memory, folder)
    except TightfitError as error:
        sys.exit(f"error: {error}")
    name = f"generated {options.big}" if options.big else options.model
    if options.save:
        save(f"{name}, {options.scheme}", figures)
    if not holds(figures):
        sys.exit("the number of segments shows in the answers")


if __name__ == "__main__":
    main()
