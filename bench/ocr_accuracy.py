"""What each scheme costs in accuracy on a real task: PP-OCRv6 recognition on printed and handwritten lines.

    python -m bench.ocr_accuracy [SCHEME...]

Compiles the model once per scheme, runs the compiled segments with onnxruntime over both sets of `bench.ocr_data`,
and writes bench/results/ocr_accuracy.{md,json}. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.bundle_runner import Asker, BundleRunner, Run, bundle_bytes, runner_of, session_of
from bench.machine import describe_machine, measured_on, threads
from bench.models import fetch
from bench.ocr_data import Line, character_error_rate, encoded, handwritten_digits, printed_lines
from compile.options import Options
from compile.pipeline import compile_model
from compile.quantize.schemes import SCHEMES
from compile.shapes import parse_shape
from targets.board import load_board
from targets.errors import TightfitError
from targets.recipe import load_recipe

RESULTS = Path(__file__).parent / "results"
MODEL = "ppocr-v6-rec"
TARGET = "raspberry-pi-5-4gb"
RECIPE = "ppocr-rec"
INPUT = "x"
SHAPE = f"{INPUT}=1,3,48,320..1600"
"""Both sets stay below 1600 columns."""
DEFAULT = [name for name, scheme in SCHEMES.items() if not scheme.calibrated]
"""`bench.int8_accuracy` has the scheme that is calibrated, with the lines that it is calibrated on."""
REPEATS = 3
"""The best of so many runs counts as a line's time, so that other work on the machine weighs less."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bytes` is the source file, or all files of the bundle."""

    model: str
    bytes: int
    cer_printed: float
    cer_handwritten: float
    exact_lines: int
    equal_to_source: int
    lines: int
    ms_per_line: float


@dataclass(slots=True)
class Reader:
    """A model under test: what it read so far, and the seconds that inference alone took."""

    name: str
    nbytes: int
    run: Run
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def read(self, image: bytes, asker: Asker) -> None:
        """Read one line."""
        tensor, frame = asker.before.tensor(image)
        best = math.inf
        for _ in range(REPEATS):
            start = time.perf_counter()
            outputs = self.run({INPUT: tensor})
            best = min(best, time.perf_counter() - start)
        self.seconds += best
        self.texts.append(asker.after.answer(outputs, frame)["text"][0].decode())


def bundle_reader(source: Path, scheme: str, bundle: Path) -> Reader:
    """Compile the model and load the bundle."""
    options = Options(scheme=scheme, shapes=(parse_shape(SHAPE),), recipe=load_recipe(RECIPE))
    compile_model(source, load_board(TARGET), bundle, options)
    return Reader(scheme, bundle_bytes(bundle), BundleRunner(bundle, threads()).run)


def measure(schemes: Sequence[str]) -> list[Row]:
    """A row for the source model and one per scheme."""
    source = fetch(MODEL)
    original = Reader("source", source.stat().st_size, runner_of(session_of(source, threads())))
    printed, handwritten = list(printed_lines()), list(handwritten_digits())
    with tempfile.TemporaryDirectory() as folder:
        compiled = [bundle_reader(source, scheme, Path(folder) / f"{scheme}.tfb") for scheme in schemes]
        readers = [original, *compiled]
        asker = Asker(Path(folder) / f"{schemes[0]}.tfb")
        for reader in readers:
            asker.ask(encoded(printed[0]), reader.run)
        # Line by line through all models, so that whatever else the machine does slows all of them alike.
        for line in (*printed, *handwritten):
            image = encoded(line)
            for reader in readers:
                reader.read(image, asker)
    return [score(reader, original, printed, handwritten) for reader in readers]


def score(reader: Reader, original: Reader, printed: Sequence[Line], handwritten: Sequence[Line]) -> Row:
    """What one model got right."""
    expected = [line.text for line in (*printed, *handwritten)]
    pairs = list(zip(expected, reader.texts, strict=True))
    return Row(
        model=reader.name,
        bytes=reader.nbytes,
        cer_printed=round(character_error_rate(pairs[: len(printed)]), 4),
        cer_handwritten=round(character_error_rate(pairs[len(printed) :]), 4),
        exact_lines=sum(wanted == text for wanted, text in pairs),
        equal_to_source=sum(text == other for text, other in zip(reader.texts, original.texts, strict=True)),
        lines=len(expected),
        ms_per_line=round(1000 * reader.seconds / len(expected), 2),
    )


def as_markdown(rows: Sequence[Row], machine: dict[str, str]) -> str:
    """The table for people, with what it was measured on."""
    lines = [
        "# OCR accuracy by scheme",
        "",
        f"PP-OCRv6 small, recognition, compiled for `{TARGET}`, on 200 rendered lines and 200 strings of five",
        "handwritten digits (`bench/ocr_data.py`). CER: character error rate, lower is better.",
        "Made by `python -m bench.ocr_accuracy`.",
        "",
        "| model | bytes | CER printed | CER handwritten | exact lines | same text as source | ms a line |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.model} | {r.bytes:,} | {r.cer_printed:.4f} | {r.cer_handwritten:.4f} | {r.exact_lines} of {r.lines} "
        f"| {r.equal_to_source} of {r.lines} | {r.ms_per_line:.1f} |"
        for r in rows
    ]
    lines += ["", measured_on(machine), ""]
    lines += [
        f"The times are those of this machine, not of the board: best of {REPEATS} for a line, mean over all lines.",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files; exit status 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.ocr_accuracy", description="OCR accuracy by scheme.")
    parser.add_argument("schemes", metavar="SCHEME", nargs="*", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    try:
        rows = measure(arguments.schemes or DEFAULT)
    except TightfitError as error:
        print(f"bench.ocr_accuracy: error: {error}", file=sys.stderr)
        return 2
    machine = describe_machine("onnx", "onnx-ir", "onnxruntime", "numpy")
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "ocr_accuracy.md").write_text(as_markdown(rows, machine))
    document = {"machine": machine, "target": TARGET, "shape": SHAPE, "rows": [asdict(row) for row in rows]}
    (arguments.results / "ocr_accuracy.json").write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
