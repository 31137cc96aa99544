"""Our compiler beside onnxruntime's quantizers, in one interleaved run: `python -m bench.quantizers --size 3GB`.

Each job is a process of its own; seconds are its wall clock, memory is the most anonymous memory it had (sampled every
10 ms) and its peak resident set. "quantize" is the compiler's own phase of that name, whose job the others do; its
whole run also verifies and plans. Medians of --rounds rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.big_model import generate, shape_for
from bench.machine import describe_machine, measured_on
from targets.tensor import human, parse_size

RESULTS = Path(__file__).parent / "results" / "quantizers"
BOARD = "x86-64-dev"
# The least that our compiler takes.
HOST_MEMORY = "400MiB"

MATMUL_NBITS = """
import sys, onnx
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
model = onnx.load(sys.argv[1])
quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=32, is_symmetric=False, accuracy_level=4)
quantizer.process()
quantizer.model.save_model_to_file(sys.argv[2], use_external_data_format=True)
"""
DYNAMIC = """
import sys
from onnxruntime.quantization import QuantType, quantize_dynamic
quantize_dynamic(sys.argv[1], sys.argv[2], weight_type=QuantType.QInt8, use_external_data_format=True)
"""


def jobs(model: Path, folder: Path, hidden: int) -> dict[str, list[str]]:
    """Name -> command."""
    ours = [sys.executable, "-m", "compile", str(model), "--target", BOARD, "--shape", f"x=1,1..16,{hidden}"]
    ours += ["--host-memory", HOST_MEMORY, "--overwrite"]
    return {
        "tightfit int4": [*ours, "--scheme", "int4", "-o", str(folder / "int4.tfb")],
        "tightfit int8-dynamic": [*ours, "--scheme", "int8-dynamic", "-o", str(folder / "int8.tfb")],
        "onnxruntime MatMulNBits": [sys.executable, "-c", MATMUL_NBITS, str(model), str(folder / "nbits.onnx")],
        "onnxruntime quantize_dynamic": [sys.executable, "-c", DYNAMIC, str(model), str(folder / "dynamic.onnx")],
    }


def measure(command: list[str]) -> dict[str, float]:
    """Run it: seconds, most anonymous bytes (children included), peak resident bytes of the largest process."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = {"anonymous": 0, "resident": 0}
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, done))
    sampler.start()
    _, errors = process.communicate()
    seconds = time.monotonic() - started
    done.set()
    sampler.join()
    if process.returncode:
        raise RuntimeError(errors.strip()[-500:])
    phase = re.search(r"^quantize and write: ([\d.]+) s", errors, re.MULTILINE)
    return {"seconds": seconds, "quantize": float(phase[1]) if phase else seconds, **peak}


def _sample(pid: int, peak: dict[str, int], done: threading.Event) -> None:
    while not done.wait(0.01):
        pids = [pid, *_children(pid)]
        found = [_status(each) for each in pids]
        peak["anonymous"] = max(peak["anonymous"], sum(f.get("RssAnon", 0) for f in found))
        peak["resident"] = max(peak["resident"], *(f.get("VmRSS", 0) for f in found))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {k: int(v.split()[0]) << 10 for k, _, v in (line.partition(":") for line in lines) if v.endswith(" kB")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("3GB"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write bench/results/quantizers.*")
    options = parser.parse_args()
    shape = shape_for(options.size, "float32")
    seen: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="tightfit-quantizers-") as name:
        folder = Path(name)
        generate(folder / "model.onnx", shape)
        for _ in range(options.rounds):
            for job, command in jobs(folder / "model.onnx", folder, shape.hidden).items():
                seen.setdefault(job, []).append(measure(command))
                print(job, {k: round(v, 1) for k, v in seen[job][-1].items()}, flush=True)
                for path in folder.glob("*"):
                    if path.is_file() and not path.name.startswith("model"):
                        path.unlink()
    medians = {job: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for job, runs in seen.items()}
    figures: dict[str, Any] = {
        "machine": describe_machine("onnxruntime", "onnx", "numpy"),
        "model_bytes": shape.nbytes,
        "rounds": options.rounds,
        "medians": medians,
    }
    print(table(figures))
    if options.save:
        RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(figures))


def table(figures: dict[str, Any]) -> str:
    """The figures for people; ratios are to `tightfit int4`."""
    medians = figures["medians"]
    ours = medians["tightfit int4"]
    lines = [
        f"# Quantizing {figures['model_bytes'] / 1e9:.1f} GB of float32 weights",
        "",
        f"One interleaved run, medians of {figures['rounds']}. Ratios are to `tightfit int4`. Ours runs with",
        f"`--host-memory {HOST_MEMORY}`. Made by `python -m bench.quantizers --save`.",
        "",
        "| job | quantize, s | ratio | whole command, s | anonymous, most | ratio | resident, most |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for job, m in medians.items():
        lines.append(
            f"| {job} | {m['quantize']:.1f} | {m['quantize'] / ours['quantize']:.1f} | {m['seconds']:.1f} "
            f"| {human(m['anonymous'])} | {m['anonymous'] / ours['anonymous']:.1f} | {human(m['resident'])} |"
        )
    return "\n".join([*lines, "", measured_on(figures["machine"]), ""])


if __name__ == "__main__":
    main()
