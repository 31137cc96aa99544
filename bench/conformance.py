"""The conformance models of the onnx package through the compiler: `python -m bench.conformance`.

    python -m bench.conformance --save                  # every model and scheme, about half an hour on two cores
    python -m bench.conformance --scheme fp32 -k conv   # those whose name holds "conv"
    python -m bench.conformance --every 20              # a sample: every 20th model

Each model of the pinned package that carries input and output files (single operators of every opset, exported
PyTorch modules, small graphs) is compiled for a board, and the bundle's segments are run on the model's own inputs.
FP32 must give the expected outputs wherever onnxruntime does for the source; the other schemes must run and give
outputs of the same shapes and types. What ends otherwise is a refusal: one line that names the reason.

Workers are processes of their own, so that a crash of native code is a result and not the end of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import re
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnxruntime

from bench.machine import describe_machine, measured_on
from bench.models import cache_folder, fetch_wheel
from bench.workers import Enough, UntilPlan, Worker, one_line, requests, spread
from compile.backends.base import backend
from compile.options import Options
from compile.pipeline import compile_model
from compile.quantize.schemes import SCHEMES
from targets.board import load_board
from targets.errors import TightfitError
from targets.tensor import DimRange

PACKAGE = "onnx==1.22.0"
KINDS = ("node", "pytorch-converted", "pytorch-operator", "simple")
BOARD = "raspberry-pi-5-4gb"
RESULTS = Path(__file__).parent / "results" / "conformance"
# The tolerances of the package's own runner for float32; half of the models hold values near 1.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
Array = npt.NDArray[Any]
LIMIT_S = 120.0
"""Past this a compilation counts as hanging; the slowest takes a few seconds."""


class Outcome(str, enum.Enum):
    """How one model ended with one scheme."""

    EQUAL = "equal"
    """Compiled, ran, gave what was expected (for a quantizing scheme: outputs of the expected shapes and types)."""
    DIFFERS = "differs"
    REFUSED = "refused"
    """One line with a reason, nothing written."""
    CRASHED = "crashed"
    """An exception that is no refusal, a dead process, or no end in time."""


class Result(msgspec.Struct, frozen=True):
    """One model, one scheme ("source": onnxruntime runs the file itself)."""

    model: str
    scheme: str
    outcome: Outcome
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its first data set."""

    name: str
    path: Path

    def inputs(self) -> list[Any]:
        return self._tensors("input")

    def outputs(self) -> list[Any]:
        return self._tensors("output")

    def _tensors(self, role: str) -> list[Any]:
        """Arrays in the order of the graph's inputs or outputs; lists for sequences, None for an empty optional."""
        graph = onnx.load(self.path, load_external_data=False).graph
        known = {tensor.name for tensor in graph.initializer}
        values = [
            v for v in (graph.input if role == "input" else graph.output) if role == "output" or v.name not in known
        ]
        folder = self.path.parent / "test_data_set_0"
        return [_read(folder / f"{role}_{index}.pb", value.type) for index, value in enumerate(values)]

    def input_names(self) -> list[str]:
        graph = onnx.load(self.path, load_external_data=False).graph
        known = {tensor.name for tensor in graph.initializer}
        return [v.name for v in graph.input if v.name not in known]


def _read(path: Path, kind: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    if kind.HasField("sequence_type"):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind.HasField("optional_type"):
        return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(data))


def conformance_models() -> list[Case]:
    """Every model of the package that has data, unpacked into the cache at the first call."""
    folder = cache_folder().parent / PACKAGE.replace("==", "-")
    data = folder / "onnx" / "backend" / "test" / "data"
    if not data.exists():
        with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(fetch_wheel(PACKAGE, Path(name))) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("onnx/backend/test/data/")])
    return [
        Case(f"{kind}/{path.parent.name}", path)
        for kind in KINDS
        for path in sorted((data / kind).glob("*/model.onnx"))
    ]


def run_source(case: Case) -> Result:
    """What onnxruntime makes of the file itself."""
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(case.path), options, providers=["CPUExecutionProvider"])
        feed = {i.name: v for i, v in zip(session.get_inputs(), case.inputs(), strict=False) if v is not None}
        made = session.run(None, feed)
    except Exception as error:  # noqa: BLE001 - its exceptions share no base class
        return Result(case.name, "source", Outcome.REFUSED, one_line(error))
    return _compared(case, "source", made, exact=True)


def run_compiled(case: Case, scheme: str, plan: bool = False) -> Result:
    """Compile the model and run what was written on the model's own inputs.

    The compiler stops in front of "plan memory", which takes three times as long as all before; with `plan` it goes on
    to the bundle.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "model.tfb"
        try:
            inputs = dict(zip(case.input_names(), case.inputs(), strict=True))
            made = _compile_and_run(case, out, _options(scheme, inputs, folder), inputs, plan)
        except TightfitError as error:
            left = "; an output was left" if out.exists() else ""
            return Result(case.name, scheme, Outcome.CRASHED if left else Outcome.REFUSED, one_line(error) + left)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Result(
                case.name,
                scheme,
                Outcome.CRASHED,
                f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {one_line(error)}",
            )
    return _compared(case, scheme, made, exact=scheme == "fp32")


def _options(scheme: str, inputs: dict[str, Any], folder: Path) -> Options:
    calib = None
    if inputs and all(isinstance(v, np.ndarray) and v.dtype != object for v in inputs.values()):
        calib = folder / "samples.npz"
        np.savez(calib, **inputs)
    shapes = tuple((n, tuple(map(_fixed, v.shape))) for n, v in inputs.items() if isinstance(v, np.ndarray))
    # Accuracy is not what is asked here: the schemes must leave every model valid.
    limit = None if scheme == "fp32" else 1e30
    return Options(scheme=scheme, calib=calib, random=calib is None or _nan(inputs), shapes=shapes, max_error=limit)


def _nan(inputs: dict[str, Any]) -> bool:
    """Whether an input holds NaN, on which nothing can be calibrated."""
    return any(v.dtype.kind == "f" and bool(np.isnan(v).any()) for v in inputs.values())


def _fixed(size: int) -> DimRange:
    return DimRange(size, size, size)


def _compile_and_run(case: Case, out: Path, options: Options, inputs: dict[str, Any], plan: bool) -> list[Any]:
    board = load_board(BOARD)
    made: dict[str, Any] = {}

    def run(folder: Path) -> None:
        # All these models are one segment.
        model = backend(board.runtime.name).load(folder / "segments/00.onnx", {})
        made.update(model.run({name: value for name, value in inputs.items() if value is not None}))

    if plan:
        compile_model(case.path, board, out, options)
        run(out)
    else:
        with contextlib.suppress(Enough):
            partial = out.with_name(f"{out.name}.partial")
            compile_model(case.path, board, out, options, UntilPlan(lambda: run(partial)))
    return [made[v.name] for v in onnx.load(case.path, load_external_data=False).graph.output]


def _compared(case: Case, scheme: str, made: Sequence[Any], exact: bool) -> Result:
    for index, (expected, value) in enumerate(zip(case.outputs(), made, strict=True)):
        reason = _difference(expected, value, exact)
        if reason:
            return Result(case.name, scheme, Outcome.DIFFERS, f"output {index}: {reason}")
    return Result(case.name, scheme, Outcome.EQUAL)


def _difference(expected: Any, made: Any, exact: bool) -> str:
    """Why `made` is not what was expected; "" where it is."""
    if isinstance(expected, list):
        if len(expected) != len(made):
            return f"{len(made)} items, expected {len(expected)}"
        return next(filter(None, (_difference(e, m, exact) for e, m in zip(expected, made, strict=True))), "")
    if expected is None or made is None:
        return "" if expected is made else f"{made!r}, expected {expected!r}"
    return _array_difference(np.asarray(expected), np.asarray(made), exact)


def _array_difference(expected: Array, made: Array, exact: bool) -> str:
    if expected.shape != made.shape:
        return f"shape {list(made.shape)}, expected {list(expected.shape)}"
    if (expected.dtype.kind in "USO") != (made.dtype.kind in "USO") or (
        expected.dtype.kind not in "USO" and expected.dtype.itemsize != made.dtype.itemsize
    ):
        return f"type {made.dtype}, expected {expected.dtype}"
    if not exact:
        return ""
    if expected.dtype.kind in "USO":
        return "" if list(map(_text, expected.ravel())) == list(map(_text, made.ravel())) else "other strings"
    # Types that numpy lacks are told apart by size alone: their bits are what is compared.
    made = made if made.dtype == expected.dtype else made.view(expected.dtype)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = expected.astype(wide), made.astype(wide)
    return "" if np.allclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True) else f"off by {np.nanmax(np.abs(a - b)):.3g}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# -- the run ---------------------------------------------------------------------------------------------------


def run_all(cases: Sequence[Case], schemes: Sequence[str], workers: int, plan: bool = False) -> Iterator[list[Result]]:
    """Results as they come, the source first. A worker that dies or hangs is replaced; its model counts as crashed."""
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(_Lane(schemes, plan)) for _ in range(min(workers, len(cases)))]
        for results, _ in spread(iter(cases), lanes, _Lane.run):
            yield results


class _Lane(Worker):
    """A worker that compiles cases under all schemes."""

    def __init__(self, schemes: Sequence[str], plan: bool) -> None:
        super().__init__(_serve, tuple(schemes), plan)
        self._schemes = schemes

    def run(self, case: Case) -> list[Result]:
        results: list[Result] = []
        try:
            self.pipe.send(case)
            for _ in range(1 + len(self._schemes)):
                if not self.pipe.poll(LIMIT_S):
                    raise TimeoutError(f"no end within {LIMIT_S:.0f} s")
                results.append(self.pipe.recv())
        except (EOFError, OSError) as error:
            self.kill()
            reason = str(error) if isinstance(error, TimeoutError) else f"exit status {self.process.exitcode}"
            names = ["source", *self._schemes]
            results += [Result(case.name, name, Outcome.CRASHED, reason) for name in names[len(results) :]]
            self.renew()
        return results


def _serve(pipe: Any, schemes: tuple[str, ...], plan: bool) -> None:
    for case in requests(pipe):
        pipe.send(run_source(case))
        for scheme in schemes:
            pipe.send(run_compiled(case, scheme, plan))


# -- the table -------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result], schemes: Sequence[str]) -> dict[str, Any]:
    """Counts by kind and outcome, and every model that is not as it should be."""
    by_model: dict[str, dict[str, Result]] = {}
    for result in results:
        by_model.setdefault(result.model, {})[result.scheme] = result
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for model, found in by_model.items():
        for scheme, result in found.items():
            row = counts.setdefault(scheme, {}).setdefault(model.partition("/")[0], dict.fromkeys(Outcome, 0))
            row[result.outcome] += 1
    failures = [
        msgspec.to_builtins(result)
        for found in by_model.values()
        for scheme, result in found.items()
        if scheme != "source" and not _as_it_should(found["source"], result)
    ]
    return {"counts": counts, "failures": failures, "schemes": list(schemes), "models": len(by_model)}


def _as_it_should(source: Result, result: Result) -> bool:
    if source.outcome is Outcome.EQUAL:
        return result.outcome is Outcome.EQUAL
    return result.outcome is not Outcome.CRASHED


def report(figures: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        "# Conformance: the models of the onnx package through the compiler",
        "",
        f"{figures['models']} of the {figures['available']} models of `{PACKAGE}` with data, compiled for",
        f"`{BOARD}` and run on their own inputs.",
        "*source*: onnxruntime runs the file itself. FP32 gives the expected values, the other schemes run and give",
        "the expected shapes and types. Made by `python -m bench.conformance --save`.",
        "",
        "| scheme | kind | " + " | ".join(outcome.value for outcome in Outcome) + " |",
        "|---|---|" + "---:|" * len(Outcome),
    ]
    for scheme in ["source", *figures["schemes"]]:
        rows = figures["counts"].get(scheme, {})
        for kind, row in rows.items():
            lines.append(f"| {scheme} | {kind} | " + " | ".join(str(row[o.value]) for o in Outcome) + " |")
        total = {o.value: sum(row[o.value] for row in rows.values()) for o in Outcome}
        lines.append(f"| **{scheme}** | all | " + " | ".join(f"**{total[o.value]}**" for o in Outcome) + " |")
    lines += ["", f"Not as with the source: {len(figures['failures'])}.", ""]
    if figures["failures"]:
        lines += ["| model | scheme | outcome | reason |", "|---|---|---|---|"]
        for failure in figures["failures"]:
            reason = re.sub(r"[|`]", " ", failure["reason"])[:160]
            lines.append(f"| {failure['model']} | {failure['scheme']} | {failure['outcome']} | {reason} |")
        lines.append("")
    return "\n".join([*lines, measured_on(figures["machine"]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", action="append", choices=tuple(SCHEMES), help="by default all")
    parser.add_argument("-k", dest="match", default="", help="only models whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="only every N-th model")
    parser.add_argument("--plan", action="store_true", help="go on to the memory plan and the bundle")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}.md and .json")
    parser.add_argument("--out", type=Path, help="write every result as a line of JSON")
    options = parser.parse_args()
    cases = [case for case in conformance_models() if options.match in case.name][:: options.every]
    if not cases:
        sys.exit(f"no model's name holds {options.match!r}")
    schemes = options.scheme or [name for name, scheme in SCHEMES.items() if not scheme.half]
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(options.out.open("w")) if options.out else None
        for count, found in enumerate(run_all(cases, schemes, options.workers, options.plan), 1):
            results += found
            for result in found:
                if lines:
                    lines.write(json.dumps(msgspec.to_builtins(result)) + "\n")
                if result.scheme != "source" and not _as_it_should(found[0], result):
                    print(f"{result.model} {result.scheme}: {result.outcome.value}: {result.reason}", flush=True)
            if count % 50 == 0:
                print(f"{count} of {len(cases)}", file=sys.stderr, flush=True)
    figures = {"machine": describe_machine("onnxruntime", "onnx", "numpy"), **summary(results, schemes)}
    figures["available"] = len(conformance_models())
    text = report(figures)
    print(text)
    if options.save:
        RESULTS.with_suffix(".md").write_text(text)
        RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
