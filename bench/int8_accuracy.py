"""Our INT8 beside onnxruntime's, on the same calibration and evaluation samples: error, its interval, and speed.

    python -m bench.int8_accuracy [TASK...] [--nanodet FILE] [--blazeface FILE] [--save]

Per task a model is calibrated on some samples and judged on others: the recogniser by character error rate, all by
relative L2 against float32. Intervals are bootstrapped over the samples, in pairs for differences. Latency is the
median of interleaved runs. Photographs are those of Debian's opencv-doc, texts the docstrings of Python's library,
sounds are made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from bench.bundle_runner import BundleRunner, Run, runner_of, session_of
from bench.int8_tasks import Array, Feed, Task, blazeface, nanodet, recogniser, sentences, voice_activity
from bench.machine import describe_machine, measured_on, threads
from compile.calibrate.collectors import DEFAULT_METHOD, METHODS
from compile.pipeline import Options, compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.errors import TightfitError

RESULTS = Path(__file__).parent / "results" / "int8_accuracy"
BOARD = "raspberry-pi-5-4gb"
ROUNDS = 15
"""Interleaved runs of each model; the ratio of their medians is reported."""


@dataclass
class Row:
    """One way to quantize one model. Errors are means over the samples with 95 % intervals."""

    task: str
    way: str
    relative_l2: float
    l2_interval: tuple[float, float]
    argmax: float
    latency: float
    error: float | None = None
    error_interval: tuple[float, float] | None = None
    against: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    failure: str = ""


# -- ways to quantize ---------------------------------------------------------------------------------------


class Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped
    """Our samples, for onnxruntime."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)


def prepared_for_onnxruntime(task: Task, folder: Path) -> Path:
    """As its documentation asks: opset 13 at least, shapes inferred, the graph optimized; and one file."""
    path = folder / "prepared.onnx"
    if path.exists():
        return path
    model = onnx.load(str(task.source))
    if model.opset_import[0].version < 13:
        model = onnx.version_converter.convert_version(model, 13)
    source = folder / "source.onnx"
    onnx.save(model, str(source))
    quant_pre_process(str(source), str(path), skip_symbolic_shape=True)
    return path


def theirs_static(task: Task, folder: Path) -> Run:
    out = folder / "static.onnx"
    quantize_static(
        str(prepared_for_onnxruntime(task, folder)), str(out), Reader(task.calibration), per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return runner_of(session_of(out, threads()))


def theirs_dynamic(task: Task, folder: Path) -> Run:
    out = folder / "dynamic.onnx"
    quantize_dynamic(
        str(prepared_for_onnxruntime(task, folder)), str(out), per_channel=True, weight_type=QuantType.QInt8
    )
    return runner_of(session_of(out, threads()))


def ours(scheme: str, method: str = DEFAULT_METHOD) -> Callable[[Task, Path], Run]:
    def build(task: Task, folder: Path) -> Run:
        samples, out = folder / "samples", folder / f"{scheme}-{method}.tfb"
        if not samples.exists():
            samples.mkdir()
            for index, feed in enumerate(task.calibration):
                np.savez(samples / f"{index:04}.npz", **feed)  # type: ignore[arg-type]
        options = Options(scheme, tuple(map(parse_shape, task.shapes)), samples, calibrate_with=method)
        compile_model(task.source, load_board(BOARD), out, options)
        return BundleRunner(out, threads()).run

    return build


WAYS: dict[str, Callable[[Task, Path], Run]] = {
    "ours int8-static": ours("int8-static"),
    "onnxruntime quantize_static": theirs_static,
    "ours int8-dynamic": ours("int8-dynamic"),
    "onnxruntime quantize_dynamic": theirs_dynamic,
}
PAIRS = {
    "ours int8-static": "onnxruntime quantize_static",
    "ours int8-dynamic": "onnxruntime quantize_dynamic",
}


# -- figures ------------------------------------------------------------------------------------------------


def measure(name: str, task: Task, ways: Mapping[str, Callable[[Task, Path], Run]]) -> list[Row]:
    """A row for each way."""
    reference = runner_of(session_of(task.source, threads()))
    truth = [reference(feed) for feed in task.evaluation]
    rows: list[Row] = []
    runs: dict[str, Run] = {"float32": reference}
    samples: dict[str, tuple[Array, Array | None]] = {}
    with tempfile.TemporaryDirectory(prefix="tightfit-int8-") as folder:
        for way, build in ways.items():
            try:
                run = build(task, Path(folder))
                outputs = [run(feed) for feed in task.evaluation]
            except Exception as error:  # noqa: BLE001 - whatever stops a quantizer is its result
                rows.append(Row(name, way, np.nan, (np.nan, np.nan), np.nan, np.nan, failure=str(error)[:120]))
                continue
            runs[way] = run
            l2 = np.array([distance(a, b) for a, b in zip(truth, outputs, strict=True)])
            own = None
            if task.error is not None:
                own = np.array([task.error(index, made) for index, made in enumerate(outputs)])
            samples[way] = l2, own
            argmax = float(np.mean([agreement(a, b) for a, b in zip(truth, outputs, strict=True)]))
            row = Row(name, way, float(l2.mean()), interval(l2), argmax, np.nan)
            if own is not None:
                row.error, row.error_interval = float(own.mean()), interval(own)
            rows.append(row)
        latency = latencies(runs, task.evaluation[0])
    for row in rows:
        row.latency = latency.get(row.way, np.nan)
        other = PAIRS.get(row.way, "")
        if row.way in samples and other in samples:
            for label, mine, their in zip(("l2", "error"), samples[row.way], samples[other], strict=True):
                if mine is not None and their is not None:
                    row.against[label] = (float((mine - their).mean()), *interval(mine - their))
    return rows


def distance(reference: Mapping[str, Array], made: Mapping[str, Array]) -> float:
    """Relative L2, mean over the outputs."""
    each = [
        np.linalg.norm(a - made[name]) / max(float(np.linalg.norm(a)), 1e-12)
        for name, a in reference.items()
        if a.dtype.kind == "f"
    ]
    return float(np.mean(each))


def agreement(reference: Mapping[str, Array], made: Mapping[str, Array]) -> float:
    """Share of equal argmax along the last axis, over all outputs that have one."""
    pairs = [(a, made[n]) for n, a in reference.items() if a.dtype.kind == "f" and a.ndim and a.shape[-1] > 1]
    return float(np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in pairs])) if pairs else 1.0


def interval(values: Array) -> tuple[float, float]:
    """95 % interval of the mean: percentiles of 2000 resamples."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def latencies(runs: Mapping[str, Run], feed: Feed) -> dict[str, float]:
    """Median seconds of each way over float32's."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run(feed)
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["float32"])
    return {name: statistics.median(taken) / base for name, taken in seconds.items()}


def as_markdown(rows: Sequence[Row], machine: dict[str, str]) -> str:
    lines = [
        "# INT8 accuracy beside onnxruntime's quantizers",
        "",
        "Means over the evaluation samples with 95 % bootstrap intervals; against float32. `ours - theirs` is paired:",
        "above zero ours is worse. CER: character error rate. Time: median over float32's, onnxruntime on both sides.",
        "Our int8-dynamic leaves convolutions float, hence no error on nets of them. Made by",
        "`python -m bench.int8_accuracy --save`; what is compared stands there.",
        "",
        "| model | way | relative L2 | ours - theirs | CER | ours - theirs | equal argmax | time |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.failure:
            lines.append(f"| {row.task} | {row.way} | fails: {row.failure} | | | | | |")
            continue
        error = "" if row.error is None or row.error_interval is None else shown(row.error, *row.error_interval)
        lines.append(
            f"| {row.task} | {row.way} | {shown(row.relative_l2, *row.l2_interval)} | {against(row, 'l2')} | {error} "
            f"| {against(row, 'error')} | {row.argmax:.4f} | {row.latency:.2f} |"
        )
    return "\n".join([*lines, "", measured_on(machine), ""])


def shown(mean: float, low: float, high: float) -> str:
    return f"{mean:.4f} [{low:.4f}, {high:.4f}]"


def against(row: Row, label: str) -> str:
    return shown(*row.against[label]) if label in row.against else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; exit status 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", metavar="TASK", nargs="*", help="ppocr-v6-rec, nanodet, blazeface, minilm, silero-vad")
    parser.add_argument("--nanodet", type=Path, help="a NanoDet of 416 x 416 in ONNX")
    parser.add_argument("--blazeface", type=Path, help="MediaPipe's BlazeFace of 256 x 256 in ONNX")
    parser.add_argument("--methods", action="store_true", help="compare our calibration methods instead")
    parser.add_argument("--save", action="store_true", help="write bench/results/int8_accuracy.*")
    options = parser.parse_args(argv)
    ort.set_default_logger_severity(4)
    tasks: dict[str, Callable[[], Task]] = {
        "ppocr-v6-rec": recogniser,
        **({"nanodet": lambda: nanodet(options.nanodet)} if options.nanodet else {}),
        **({"blazeface": lambda: blazeface(options.blazeface)} if options.blazeface else {}),
        "minilm": sentences,
        "silero-vad": voice_activity,
    }
    ways = {f"ours {method}": ours("int8-static", method) for method in METHODS} if options.methods else WAYS
    rows: list[Row] = []
    try:
        for name in options.tasks or tasks:
            if name not in tasks:
                raise TightfitError(f"unknown task {name!r}", f"available: {', '.join(tasks)}")
            rows += measure(name, tasks[name](), ways)
            print(as_markdown(rows[-len(ways) :], describe_machine()), flush=True)
    except TightfitError as error:
        print(f"bench.int8_accuracy: error: {error}", file=sys.stderr)
        return 2
    if options.save:
        machine = describe_machine("onnx", "onnxruntime", "numpy")
        RESULTS.with_suffix(".md").write_text(as_markdown(rows, machine))
        document = {"machine": machine, "rows": [asdict(row) for row in rows]}
        RESULTS.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
