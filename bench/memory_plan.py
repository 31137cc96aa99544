"""Memory that the plan predicts beside memory that the service used: `python -m bench.memory_plan`.

For each bundle the real agent is started, every slot is filled with requests of the largest shape at the same time,
and the peak is read twice: from the memory cgroup where one can be made, and as proportional set size summed over
both processes, by kind. The fixed cost F_rt of the runtime is measured the same way, with a model of one operator,
and taken off both sides, so that the ratio is about the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import onnx
from onnx import TensorProto, helper

from agent.memory import pss_by_kind
from bench.machine import describe_machine
from bench.models import fetch
from compile.pipeline import Options, compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.budget import KINDS
from targets.bundle import Manifest, read_manifest
from targets.tensor import DType

BOARD = "raspberry-pi-5-4gb"
RESULTS = Path(__file__).parent / "results" / "memory_plan"
ROUNDS = 6
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and what it is called in the table."""

    label: str
    model: str
    scheme: str
    shapes: tuple[str, ...]


LLM_SHAPES = ("input_ids=1,1..16..64", "past.0.k=1,3,0..64..256,64")
CASES = (
    Case("PP-OCRv6 rec", "ppocr-v6-rec", "fp32", ("x=1,3,48,320..1600",)),
    Case("PP-OCRv6 rec", "ppocr-v6-rec", "int4", ("x=1,3,48,320..1600",)),
    Case("PP-OCRv6 det", "ppocr-v6-det", "fp32", ("x=1,3,640,640",)),
    Case("SmolLM2-135M", "smollm2-135m", "fp32", LLM_SHAPES),
    Case("SmolLM2-135M", "smollm2-135m", "int8-weights", LLM_SHAPES),
    Case("SmolLM2-135M", "smollm2-135m", "int4", LLM_SHAPES),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Peak bytes of one service: by kind over both processes, and what the cgroup charged (0: none could be made)."""

    kinds: dict[str, int]
    cgroup: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@contextlib.contextmanager
def cgroup() -> Iterator[Path | None]:
    """A memory cgroup (version 1) for one service, where this process may make one."""
    folder = CGROUP_V1 / f"tightfit-bench-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def measure(bundle: Path) -> Measured:
    """Serve the bundle, fill its slots at the largest shape `ROUNDS` times, and return the peak."""
    manifest = read_manifest(bundle)
    with cgroup() as group:
        process = subprocess.Popen(
            [*joining(group), sys.executable, "-m", "agent", "serve", "--bundle", str(bundle), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the agent did not start for {bundle.name}")
            engine = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
            with Watch(process.pid, engine) as watch:
                asyncio.run(fill_slots(line.split()[-1], manifest))
            peak = int((group / "memory.max_usage_in_bytes").read_text()) if group else 0
            return Measured(watch.peak, peak)
        finally:
            process.terminate()
            process.wait(30)


def joining(group: Path | None) -> list[str]:
    """A command in front of another that puts itself, and so the other, into the cgroup."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"] if group else []


class Watch:
    """Samples both processes' memory; keeps, for the moment of the largest sum, every kind."""

    def __init__(self, *pids: int) -> None:
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._sample()

    def _sample(self) -> None:
        parts = [pss_by_kind(pid) for pid in self._pids]
        kinds = {kind: sum(part.get(kind, 0) for part in parts) for kind in KINDS}
        if sum(kinds.values()) > sum(self.peak.values()):
            self.peak = kinds


async def fill_slots(url: str, manifest: Manifest) -> None:
    """As many requests at once as there are slots, binary in and out, all at the largest shape."""
    body, headers = largest_request(manifest)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def one() -> None:
            async with session.post(f"{url}/v2/models/{manifest.name}/infer", data=body, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {(await response.read())[:300]!r}")
                await response.read()

        for _ in range(ROUNDS):
            await asyncio.gather(*(one() for _ in range(manifest.plan.slots)))


def largest_request(manifest: Manifest) -> tuple[bytes, dict[str, str]]:
    """One infer request with every dimension at its maximum."""
    rng = np.random.default_rng(0)
    inputs, chunks = [], []
    for spec in manifest.contract.inputs:
        shape = [dim if isinstance(dim, int) else manifest.contract.dims[dim].max for dim in spec.shape]
        floats = spec.dtype in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
        values = rng.standard_normal(shape) if floats else rng.integers(0, 2, shape)
        data = values.astype(np.dtype(spec.dtype.numpy)).tobytes()
        chunks.append(data)
        entry = {"name": spec.name, "datatype": spec.dtype.oip, "shape": shape}
        inputs.append({**entry, "parameters": {"binary_data_size": len(data)}})
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(chunks), {"Inference-Header-Content-Length": str(len(head))}


def build(folder: Path, case: Case) -> Path:
    """Compile one case."""
    out = folder / f"{case.model}-{case.scheme}.tfb"
    shapes = tuple(parse_shape(text) for text in case.shapes)
    compile_model(fetch(case.model), load_board(BOARD), out, Options(scheme=case.scheme, shapes=shapes))
    return out


def build_empty(folder: Path) -> Path:
    """A model of one operator: what remains is the runtime."""
    tensor = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "empty", tensor[:1], tensor[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "empty.onnx")
    out = folder / "empty.tfb"
    compile_model(folder / "empty.onnx", load_board(BOARD), out, Options())
    return out


def predicted(manifest: Manifest) -> dict[str, int]:
    """Bytes of the run phase by kind, F_rt left out."""
    phase = manifest.plan.phase("run")
    fixed = phase.term("runtime")
    assert fixed is not None
    return {kind: phase.kind_bytes(kind) - (fixed.nbytes if fixed.kind == kind else 0) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model or scheme contains this; nothing is saved then")
    chosen = parser.parse_args().only
    cases = [case for case in CASES if chosen in f"{case.model} {case.scheme}"]
    with tempfile.TemporaryDirectory(prefix="tightfit-memory-") as name:
        folder = Path(name)
        fixed = measure(build_empty(folder))
        print(f"F_rt: {fixed.total / 2**20:.1f} MiB", {k: round(v / 2**20, 1) for k, v in fixed.kinds.items()})
        rows = []
        for case in cases:
            bundle = build(folder, case)
            plan, seen = predicted(read_manifest(bundle)), measure(bundle)
            rows.append(row(case, plan, seen, fixed, sum(e.nbytes for e in read_manifest(bundle).files)))
            print(json.dumps(rows[-1]))
    if not chosen:
        save(fixed, rows)


def row(case: Case, plan: dict[str, int], seen: Measured, fixed: Measured, size: int) -> dict[str, object]:
    """One line of the table, bytes; measured less F_rt."""
    kinds = {kind: seen.kinds[kind] - fixed.kinds[kind] for kind in KINDS}
    total = sum(kinds.values())
    return {
        "model": case.label,
        "scheme": case.scheme,
        "bundle_bytes": size,
        "predicted": plan,
        "measured": kinds,
        "predicted_total": sum(plan.values()),
        "measured_total": total,
        "ratio": round(sum(plan.values()) / total, 3),
        "cgroup_peak_less_fixed": seen.cgroup - fixed.cgroup if seen.cgroup else None,
    }


def save(fixed: Measured, rows: list[dict[str, object]]) -> None:
    """Write the table and the figures behind it."""
    machine = describe_machine("onnxruntime", "numpy")
    figures = {"machine": machine, "fixed": dataclasses.asdict(fixed), "rows": rows}
    RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(machine, fixed, rows))


def mib(value: object) -> str:
    """Bytes in MiB."""
    return f"{float(str(value)) / 2**20:,.1f}"


def table(machine: dict[str, str], fixed: Measured, rows: list[dict[str, object]]) -> str:
    """The figures for people."""
    lines = [
        "# Memory: the plan beside the service",
        "",
        f"Bundles for `{BOARD}`, served by the real agent, every slot filled at the largest shape. MiB, without the",
        f"runtime's fixed cost F_rt, which is {mib(fixed.total)} here. PSS summed over both processes; ratio = plan /",
        "measured. Made by `python -m bench.memory_plan`.",
        "",
        "| model | scheme | bundle | anonymous: plan / measured | file: plan / measured | shared: plan / measured "
        "| total: plan / measured | ratio | cgroup peak |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in rows:
        plan, seen = entry["predicted"], entry["measured"]
        assert isinstance(plan, dict)
        assert isinstance(seen, dict)
        kinds = " | ".join(f"{mib(plan[kind])} / {mib(seen[kind])}" for kind in KINDS)
        total = f"{mib(entry['predicted_total'])} / {mib(entry['measured_total'])}"
        peak = mib(entry["cgroup_peak_less_fixed"]) if entry["cgroup_peak_less_fixed"] else "-"
        lines.append(
            f"| {entry['model']} | {entry['scheme']} | {mib(entry['bundle_bytes'])} | {kinds} | {total} "
            f"| {entry['ratio']} | {peak} |"
        )
    lines += [
        "",
        "The cgroup also charges the page cache of files that were read once (digests of every bundle file are checked",
        "at start), which the kernel drops when memory is short; PSS counts what is mapped.",
        "",
        "Measured on: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
