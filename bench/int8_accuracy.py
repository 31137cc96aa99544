"""Our INT8 beside onnxruntime's, on the same calibration and evaluation samples: error, its interval, and speed.

    python -m bench.int8_accuracy [TASK...] [--nanodet FILE --boxes FILE] [--blazeface FILE] [--sections FILE] [--save]

`bench.int8_tasks` says what each model is calibrated on, and by which metric of its own it is judged. Beside that
stands relative L2 against float32, mean over outputs and runs. Intervals are bootstrapped over the samples, in pairs
for differences. Latency is the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from bench.bundle_runner import BundleRunner, Run, runner_of, session_of
from bench.int8_tasks import Array, Feed, Metric, Task, blazeface, mean, nanodet, recogniser, sections, voice_activity
from bench.machine import describe_machine, measured_on, threads
from compile.calibrate.collectors import DEFAULT_METHOD, METHODS
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.errors import TightfitError

RESULTS = Path(__file__).parent / "results" / "int8_accuracy"
BOARD = "raspberry-pi-5-4gb"
FLOAT = "float32"
RESAMPLES = 2000
ROUNDS = 15
"""Interleaved runs of each model; the ratio of their medians is reported."""


Figure = tuple[float, float, float]
"""A value and the ends of its 95 % interval."""
L2 = "relative L2"


@dataclass
class Row:
    """One way to run one model: its errors by metric, and how much larger they are than its rival's."""

    task: str
    way: str
    errors: dict[str, Figure] = field(default_factory=dict)
    against: dict[str, Figure] = field(default_factory=dict)
    latency: float = math.nan
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


def theirs_static(*operators: str) -> Callable[[Task, Path], Run]:
    """Of the given operators only, or of all that it quantizes by default."""

    def build(task: Task, folder: Path) -> Run:
        out = folder / "static.onnx"
        quantize_static(
            str(prepared_for_onnxruntime(task, folder)), str(out), Reader(task.calibration), per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, op_types_to_quantize=operators or None,
        )  # fmt: skip
        return runner_of(session_of(out, threads()))

    return build


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
    "onnxruntime quantize_static": theirs_static(),
    "onnxruntime quantize_static, products": theirs_static("Conv", "MatMul", "Gemm"),
    "ours int8-dynamic": ours("int8-dynamic"),
    "onnxruntime quantize_dynamic": theirs_dynamic,
}
RIVALS = {
    "ours int8-static": ("onnxruntime quantize_static", "onnxruntime quantize_static, products"),
    "ours int8-dynamic": ("onnxruntime quantize_dynamic",),
}
"""Ours is compared with the one that is better by the metric at hand."""


# -- figures ------------------------------------------------------------------------------------------------


class Compared:
    """A model whose runs are compared with those of float32, in the same order."""

    def __init__(self, run: Run, truth: Sequence[Mapping[str, Array]]) -> None:
        self._run, self._truth = run, iter(truth)
        self.distances: list[float] = []

    def __call__(self, feed: Feed) -> Mapping[str, Array]:
        made = self._run(feed)
        self.distances.append(distance(next(self._truth), made))
        return made


def measure(name: str, task: Task, ways: Mapping[str, Callable[[Task, Path], Run]]) -> list[Row]:
    """A row for float32, and one for each way."""
    truth: list[Mapping[str, Array]] = []
    reference = runner_of(session_of(task.source, threads()))

    def noted(feed: Feed) -> Mapping[str, Array]:
        truth.append(reference(feed))
        return truth[-1]

    runs: dict[str, Run] = {FLOAT: reference}
    draws = {FLOAT: resampled(task.metrics, task.judge(noted))}
    rows = {FLOAT: Row(name, FLOAT)}
    with tempfile.TemporaryDirectory(prefix="tightfit-int8-") as folder:
        for way, build in ways.items():
            rows[way] = Row(name, way)
            try:
                run = build(task, Path(folder))
                compared = Compared(run, truth)
                records = task.judge(compared)
            except Exception as error:  # noqa: BLE001 - whatever stops a quantizer is its result
                rows[way].failure = str(error)[:120]
                continue
            runs[way] = run
            draws[way] = resampled(task.metrics, records) | resampled({L2: mean}, compared.distances)
        latency = latencies(runs, task.calibration[0])
    for way, drawn in draws.items():
        rivals = [draws[rival] for rival in RIVALS.get(way, ()) if rival in draws]
        rows[way].latency = latency[way]
        for metric, values in drawn.items():
            rows[way].errors[metric] = figure(values)
            if rivals:
                best = min((rival[metric] for rival in rivals), key=lambda each: each[0])
                rows[way].against[metric] = figure(values - best)
    return list(rows.values())


def resampled(metrics: Mapping[str, Metric], records: Sequence[Any]) -> dict[str, Array]:
    """Of each metric its value, then those of as many samples drawn with replacement; equal draws for equal counts."""
    rng = np.random.default_rng(0)
    chosen = [np.arange(len(records)), *rng.integers(0, len(records), (RESAMPLES, len(records)))]
    return {
        name: np.array([metric([records[index] for index in each]) for each in chosen])
        for name, metric in metrics.items()
    }


def figure(values: Array) -> Figure:
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return float(values[0]), float(low), float(high)


def distance(reference: Mapping[str, Array], made: Mapping[str, Array]) -> float:
    """Relative L2, mean over the outputs."""
    each = [
        np.linalg.norm(a - made[name]) / max(float(np.linalg.norm(a)), 1e-12)
        for name, a in reference.items()
        if a.dtype.kind == "f"
    ]
    return float(np.mean(each))


def latencies(runs: Mapping[str, Run], feed: Feed) -> dict[str, float]:
    """Median seconds of each way over float32's."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run(feed)
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds[FLOAT])
    return {name: statistics.median(taken) / base for name, taken in seconds.items()}


def as_markdown(rows: Sequence[Row], machine: dict[str, str]) -> str:
    lines = [
        "# INT8 accuracy beside onnxruntime's quantizers",
        "",
        "Errors, zero is best, with 95 % bootstrap intervals over the samples; `ours - theirs` is paired, with the",
        "better of theirs: above zero ours is worse. Time: median over float32's, onnxruntime on both sides, on a",
        "machine under load. Our int8-dynamic leaves convolutions float: hardly an error on nets of them. Made by",
        "`python -m bench.int8_accuracy --save`; what is compared stands there and in `bench/int8_tasks.py`.",
        "",
        "| model | metric | way | error | ours - theirs | time |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        if row.failure:
            lines.append(f"| {row.task} | | {row.way} | fails: {row.failure} | | |")
        for metric, error in row.errors.items():
            against = shown(row.against[metric]) if metric in row.against else ""
            lines.append(f"| {row.task} | {metric} | {row.way} | {shown(error)} | {against} | {row.latency:.2f} |")
    return "\n".join([*lines, "", measured_on(machine), ""])


def shown(figure: Figure) -> str:
    return "{:.4f} [{:.4f}, {:.4f}]".format(*figure)


TASKS: dict[str, tuple[Callable[..., Task], tuple[str, ...]]] = {
    "ppocr-v6-rec": (recogniser, ()),
    "nanodet": (nanodet, ("nanodet", "boxes")),
    "blazeface": (blazeface, ("blazeface",)),
    "minilm": (sections, ("sections",)),
    "silero-vad": (voice_activity, ()),
}
"""What makes each task, and the options with the files that it needs."""


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Task]]:
    """The tasks that were asked for; by default all whose files are given. All names and files are judged first."""
    wanted = options.tasks or [
        name for name, (_, needs) in TASKS.items() if all(getattr(options, need) for need in needs)
    ]
    for name in wanted:
        if name not in TASKS:
            raise TightfitError(f"unknown task {name!r}", f"available: {', '.join(TASKS)}")
        for need in TASKS[name][1]:
            path = getattr(options, need)
            if path is None:
                raise TightfitError(f"{name} needs a file that was not given", f"--{need} FILE")
            if not path.is_file():
                raise TightfitError(f"--{need}: there is no file {path}")
    for name in wanted:
        make, needs = TASKS[name]
        yield name, make(*(getattr(options, need) for need in needs))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; exit status 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", metavar="TASK", nargs="*", help=f"{', '.join(TASKS)}; all whose files are given")
    parser.add_argument("--nanodet", type=Path, help="a NanoDet of COCO's classes in ONNX")
    parser.add_argument("--boxes", type=Path, help="JSON of photographs and what is where in them, for nanodet")
    parser.add_argument("--blazeface", type=Path, help="MediaPipe's BlazeFace of 256 x 256 in ONNX")
    parser.add_argument("--sections", type=Path, help="JSON lines of text and label, for minilm")
    parser.add_argument("--methods", action="store_true", help="compare our calibration methods instead")
    parser.add_argument("--save", action="store_true", help="write bench/results/int8_accuracy.*")
    options = parser.parse_args(argv)
    ort.set_default_logger_severity(4)
    ways = {f"ours {method}": ours("int8-static", method) for method in METHODS} if options.methods else WAYS
    rows: list[Row] = []
    try:
        for name, task in chosen(options):
            rows += measure(name, task, ways)
            print(as_markdown(rows[-len(ways) - 1 :], describe_machine()), flush=True)
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
