"""Memory and latency by residency of the weights: `python -m bench.residency`.

Two generated models, one INT4 and one FP32, are compiled to several segments, finalised and served by the real agent
once for every residency. PSS is the engine's, by kind; "most" is the largest seen while requests run. Latency is that
of the client, one request after the other, binary tensors. Outputs are compared byte by byte with those from the heap.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agent.memory import pss_by_kind
from bench.big_model import generate, shape_for
from bench.machine import describe_machine, measured_on
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import Manifest, Residency, read_manifest
from targets.tensor import parse_size

RESULTS = Path(__file__).parent / "results" / "residency"
BOARD = "x86-64-dev"
MAX_ROWS = 16
REQUESTS = {1: 15, MAX_ROWS: 7}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `size` bytes of FP32 weights; less `host_memory` makes more segments."""

    scheme: str
    size: str
    host_memory: str
    residencies: tuple[Residency, ...]


LAID_OUT = (Residency.HEAP, Residency.MAPPED, Residency.STREAMED)
CASES = (
    Case("int4", "4GB", "600MiB", LAID_OUT),
    Case("fp32", "1GB", "2GiB", (*LAID_OUT, Residency.UNPACKED)),
)


class Client:
    """One connection to a served model."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        self._path = f"/v2/models/{manifest.name}/infer"
        self._hidden = int(manifest.contract.inputs[0].shape[-1])

    def ask(self, rows: int) -> tuple[float, bytes]:
        """(seconds, output bytes) of a request that is always the same."""
        data = np.random.default_rng(rows).standard_normal((1, rows, self._hidden), np.float32).tobytes()
        x = {"name": "x", "datatype": "FP32", "shape": [1, rows, self._hidden]}
        inputs = [{**x, "parameters": {"binary_data_size": len(data)}}]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        started = time.perf_counter()
        self._connection.request("POST", self._path, head + data, {"Inference-Header-Content-Length": str(len(head))})
        response = self._connection.getresponse()
        body = response.read()
        seconds = time.perf_counter() - started
        assert response.status == 200, body[:300]
        return seconds, body[int(response.headers["Inference-Header-Content-Length"]) :]

    def streamed_bytes(self) -> float:
        self._connection.request("GET", "/metrics")
        lines = self._connection.getresponse().read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("tightfit_streamed_bytes_total{")))


@contextlib.contextmanager
def serving(bundle: Path, residency: Residency, log: Path) -> Iterator[tuple[str, int, float]]:
    """(address, engine's process id, seconds that loading took) of a served bundle."""
    command = [sys.executable, "-m", "agent", "serve", "--bundle", str(bundle), "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--residency", residency.value, "--cache", str(cache_of(bundle))],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        events = [json.loads(entry) for entry in log.read_text().splitlines()]
        load_s = next(event["load_s"] for event in events if event["event"] == "engine ready")
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        (engine,) = [int(child) for children in threads for child in children.read_text().split()]
        yield line.split()[-1], engine, load_s
    finally:
        process.terminate()
        process.wait(60)


def cache_of(bundle: Path) -> Path:
    return bundle.with_name(bundle.name + ".finalised")


@contextlib.contextmanager
def watching(pid: int) -> Iterator[dict[str, int]]:
    """The most of every kind while the block runs."""
    most: dict[str, int] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            for kind, nbytes in pss_by_kind(pid).items():
                most[kind] = max(most.get(kind, 0), nbytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def measure(bundle: Path, residency: Residency, log: Path) -> dict[str, Any]:
    """Serve the bundle this way: seconds, bytes, and a digest of what it answered."""
    manifest = read_manifest(bundle)
    with serving(bundle, residency, log) as (url, engine, load_s):
        client = Client(url, manifest)
        answers = b"".join(client.ask(rows)[1] for rows in (1, 2, MAX_ROWS))
        before = client.streamed_bytes()
        p50 = {rows: statistics.median(client.ask(rows)[0] for _ in range(n)) for rows, n in REQUESTS.items()}
        streamed = (client.streamed_bytes() - before) / sum(REQUESTS.values())
        with watching(engine) as most:
            for _ in range(3):
                client.ask(MAX_ROWS)
        time.sleep(1)
        return {
            "residency": residency.value,
            "load_s": load_s,
            "idle": pss_by_kind(engine),
            "most": most,
            "p50_s": p50,
            "streamed_bytes_per_request": round(streamed),
            "answers": hashlib.sha256(answers).hexdigest(),
        }


def run_case(folder: Path, case: Case) -> dict[str, Any]:
    """Make the model and the bundle, finalise it, and measure every residency."""
    shape = shape_for(parse_size(case.size), "float32")
    model, bundle = folder / f"big-{case.scheme}.onnx", folder / f"big-{case.scheme}.tfb"
    generate(model, shape)
    options = Options(
        scheme=case.scheme,
        shapes=(parse_shape(f"x=1,1..{MAX_ROWS},{shape.hidden}"),),
        host_memory=parse_size(case.host_memory),
    )
    compile_model(model, load_board(BOARD), bundle, options)
    for path in folder.glob(f"{model.name}*"):
        path.unlink()
    command = [sys.executable, "-m", "agent", "finalise", str(bundle), "--residency", "mapped", "--json"]
    done = subprocess.run([*command, "--cache", str(cache_of(bundle))], capture_output=True, text=True, check=True)
    finalised = json.loads(done.stdout)
    manifest = read_manifest(bundle)
    return {
        "scheme": case.scheme,
        "parameters": shape.parameters,
        "segments": len(manifest.segments),
        "bundle_bytes": sum(entry.nbytes for entry in manifest.files),
        "finalised_bytes": finalised["total_bytes"],
        "finalise_s": finalised["seconds"],
        "finalise_peak_bytes": finalised["peak_bytes"],
        "rows": [measure(bundle, residency, folder / "agent.log") for residency in case.residencies],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work, 9 GB; by default a temporary folder")
    parser.add_argument("--only", default="", help="the scheme to measure; nothing is saved then")
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.only in ("", case.scheme):
            with tempfile.TemporaryDirectory(prefix="tightfit-residency-", dir=options.folder) as name:
                results.append(run_case(Path(name), case))
            print(json.dumps(results[-1], indent=1))
    if not options.only:
        figures = {"machine": describe_machine("onnxruntime", "numpy"), "cases": results}
        RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(report(figures))


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"


def report(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        "# Where the weights are",
        "",
        "Generated decoders, served by the real agent; PSS of the engine process in MiB, with Python and runtime.",
        "p50 at the client, 1 and 16 rows a request.",
        "Made by `python -m bench.residency`.",
        "",
        "| scheme | segments | residency | load, s | anonymous | file | anonymous, most | file, most "
        "| p50, 1 row, ms | p50, 16 rows, ms | streamed a request, MiB | outputs |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case in figures["cases"]:
        for row in case["rows"]:
            idle, most = row["idle"], row["most"]
            same = row["answers"] == case["rows"][0]["answers"]
            lines.append(
                f"| {case['scheme']} | {case['segments']} | {row['residency']} | {row['load_s']:.2f} "
                f"| {mib(idle['anonymous'])} | {mib(idle['file'])} | {mib(most['anonymous'])} | {mib(most['file'])} "
                f"| {row['p50_s'][1] * 1e3:,.1f} | {row['p50_s'][MAX_ROWS] * 1e3:,.1f} "
                f"| {mib(row['streamed_bytes_per_request'])} | {'equal bits' if same else 'other bits'} |"
            )
    lines += [
        "",
        "| scheme | parameters | bundle, MiB | finalised files, MiB | finalise, s | its largest process, MiB RSS |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {case['scheme']} | {case['parameters'] / 1e9:.2f} G | {mib(case['bundle_bytes'])} "
        f"| {mib(case['finalised_bytes'])} | {case['finalise_s']:.1f} | {mib(case['finalise_peak_bytes'])} |"
        for case in figures["cases"]
    ]
    lines += [
        "",
        "Heap, mapped and unpacked are warm. The pages of a streamed segment leave memory after its turn, so every",
        "request reads them from the disk again. Unpacked float products add up in another order than laid-out ones.",
        "",
        measured_on(figures["machine"]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
