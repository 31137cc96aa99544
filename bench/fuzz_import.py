"""Damaged ONNX files into the compiler: `python -m bench.fuzz_import --save`.

    python -m bench.fuzz_import                          # 100,000 cases, about half an hour on two cores
    python -m bench.fuzz_import --count 2000 --seed 7    # fewer, and others
    python -m bench.fuzz_import --seed 7 --case 123      # one of them: what it is and how it ends
    python -m bench.fuzz_import --seed 7 --case 123 --write bad.onnx

Each case (bench/mutate_onnx.py) goes through `compile_model`: read, shapes, passes, lowering under one of the schemes,
segments written, and source and result loaded and run by onnxruntime. One case in 200 goes on to the end, with its
memory observed and planned. It must end in a bundle or in one line that says what is wrong, leave nothing behind,
print nothing, stay below `--host-memory`, and end in time. Whatever else happens is a finding: it is tried again in a
fresh process, and reduced to the mutations that it needs.

Workers are processes of their own, whose memory is measured after every case, and ends at twice what it may be
(RLIMIT_DATA): what kills one is a result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import gc
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from bench.machine import describe_machine, measured_on
from bench.mutate_onnx import WEIGHTS, Case, Made, Seed, make, make_seeds, parsed, whole_case
from bench.workers import KEPT, Enough, UntilPlan, Worker, one_line, requests, spread
from compile.backends import ort_session
from compile.options import Options
from compile.pipeline import compile_model
from compile.processes import forget_peak, status_of
from compile.quantize.schemes import SCHEMES
from compile.shapes import ShapeRequest
from targets.board import load_board
from targets.errors import TightfitError
from targets.tensor import DimRange

RESULT = Path(__file__).parent / "results" / "fuzz_import.md"
_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.half)
BOARD = "raspberry-pi-5-4gb"
HOST_MEMORY = 2 << 30
TO_THE_END = 200
"""One case in so many is compiled to the end, which starts processes of its own."""
LIMIT_S = 10.0
"""Processor time after which a case counts as hanging, whatever else the machine does."""
RUN_LIMIT_S = 3
"""After which a run by onnxruntime is ended, an hour otherwise: a loop of 2^62 rounds is a valid model."""
STANDSTILL_S = 120.0
"""Time after which it does in any case."""
# A person reads one line.
_LONGEST_LINE = 1000
_OWN_FAULT = "please report this"


class Outcome(str, enum.Enum):
    """How a case ended."""

    COMPILED = "compiled"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    """An exception that is no TightfitError, or one that blames the compiler."""
    DIED = "died"
    HUNG = "hung"
    MEMORY = "over the memory"
    UNCLEAN = "unclean"
    """Something was printed or left behind, or the message is no line."""


FINDINGS = (Outcome.TRACEBACK, Outcome.DIED, Outcome.HUNG, Outcome.MEMORY, Outcome.UNCLEAN)
# These may come from what the process did before, or from a busy machine: they are tried again in a fresh one.
_OF_THE_PROCESS = (Outcome.DIED, Outcome.HUNG, Outcome.MEMORY)


@dataclasses.dataclass(frozen=True)
class Result:
    """How a case ended, in which phase of the compiler, and with which words."""

    case: Case
    outcome: Outcome
    phase: str = ""
    reason: str = ""
    where: str = ""

    @property
    def kind(self) -> str:
        """Equal for findings that are probably one fault."""
        return f"{self.outcome.value} | {self.phase} | {self.where or _plain(self.reason)}"


def _plain(reason: str) -> str:
    """A message without the names and numbers of one model."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|-?\d[\d.]*|/\S+", "*", reason)[:110]


# -- one case, in a worker -------------------------------------------------------------------------------------


def run_case(case: Case, made: Made, folder: Path) -> Result:
    """Compile the case's model in this process; `folder` is empty and will be again."""
    source, out = folder / "model.onnx", folder / "out.tfb"
    source.write_bytes(made.model)
    if made.weights:
        (folder / WEIGHTS).write_bytes(made.weights)
    rng = random.Random(f"{case.seed}/{case.number}/options")
    scheme = rng.choice(_SCHEMES)
    options = Options(scheme=scheme, shapes=_shapes(made, rng), random=True, host_memory=HOST_MEMORY, samples=2)
    progress = UntilPlan(whole=case.number % TO_THE_END == 0)
    try:
        compile_model(source, load_board(BOARD), out, options, progress)
    except Enough:
        result = Result(case, Outcome.COMPILED, progress.reached)
    except TightfitError as error:
        result = _refused(case, progress.reached, error)
    except MemoryError as error:
        result = Result(case, Outcome.MEMORY, progress.reached, one_line(error), _where(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        text = f"{type(error).__name__}: {one_line(error)}"
        result = Result(case, Outcome.TRACEBACK, progress.reached, text, f"{type(error).__name__} {_where(error)}")
    else:
        result = Result(case, Outcome.COMPILED, progress.reached)
        for path in sorted(out.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        out.rmdir()
    for path in (source, folder / WEIGHTS):
        path.unlink(missing_ok=True)
    left = [path.name for path in folder.iterdir()]
    return Result(case, Outcome.UNCLEAN, progress.reached, f"left behind: {left}") if left else result


def _refused(case: Case, phase: str, error: TightfitError) -> Result:
    text = str(error)
    outcome = Outcome.REFUSED
    if _OWN_FAULT in text:
        outcome = Outcome.TRACEBACK
    elif len(text) > _LONGEST_LINE or not text.isprintable():
        outcome = Outcome.UNCLEAN
    return Result(case, outcome, phase, f"{type(error).__name__}: {one_line(error)}")


def _shapes(made: Made, rng: random.Random) -> tuple[ShapeRequest, ...]:
    """A size or a range for every open dimension that the file, if it is a model, declares."""
    proto = parsed(made)
    wanted = rng.choice((DimRange(2, 2, 2), DimRange(3, 3, 3), DimRange(1, 2, 3)))
    stored = {tensor.name for tensor in proto.graph.initializer} if proto else set()
    return tuple(
        (value.name, tuple(_range(dim, wanted) for dim in value.type.tensor_type.shape.dim))
        for value in (proto.graph.input if proto else ())
        if value.name not in stored
        and any(dim.WhichOneof("value") != "dim_value" or dim.dim_value < 0 for dim in value.type.tensor_type.shape.dim)
    )


def _range(dim: onnx.TensorShapeProto.Dimension, wanted: DimRange) -> DimRange:
    fixed = dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0
    return DimRange(dim.dim_value, dim.dim_value, dim.dim_value) if fixed else wanted


def _where(error: BaseException) -> str:
    """The last place of the traceback, and the last in this repository."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/compile/" in frame.filename and "site-packages" not in frame.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.name}" for f in (frames[-1], *ours[-1:]))


def _serve(pipe: Any, seeds: tuple[Seed, ...]) -> None:
    """A worker: cases in, results out. What it prints goes into a file, which is looked at behind every case."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    ort_session.RUN_TIMEOUT_S = RUN_LIMIT_S
    resource.setrlimit(resource.RLIMIT_DATA, (2 * HOST_MEMORY, 2 * HOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory(dir=_memory_disk()) as folder:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        for case in requests(pipe):
            forget_peak(os.getpid())
            result = run_case(case, make(case, seeds), Path(folder))
            status = status_of(os.getpid())
            peak = status.peak_resident if status else 0
            if peak > HOST_MEMORY:
                result = Result(case, Outcome.MEMORY, result.phase, f"{peak >> 20} MiB: {result.reason}")
            text = os.pread(printed.fileno(), KEPT, 0).decode(errors="replace")
            if text and result.outcome in (Outcome.COMPILED, Outcome.REFUSED):
                result = Result(case, Outcome.UNCLEAN, result.phase, f"printed: {' '.join(text.split())}")
            os.ftruncate(printed.fileno(), 0)
            os.lseek(printed.fileno(), 0, os.SEEK_SET)
            pipe.send((result, peak))


def _memory_disk() -> str | None:
    """Where small files cost nothing, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a folder of its own is made there


# -- the run ---------------------------------------------------------------------------------------------------


class Lane(Worker):
    """A worker that compiles cases; `peak`: the most of its memory that was resident (bytes)."""

    def __init__(self, seeds: Sequence[Seed]) -> None:
        super().__init__(_serve, tuple(seeds))
        self.peak = 0

    def run(self, case: Case) -> Result:
        """How the case ends; a worker that dies over it, or is killed because time is up, is replaced."""
        begun, used = time.monotonic(), self._used()
        try:
            self.pipe.send(case)
            while self._used() - used < LIMIT_S and time.monotonic() - begun < STANDSTILL_S:
                if self.pipe.poll(1.0):
                    result, peak = self.pipe.recv()
                    self.peak = max(self.peak, peak)
                    return result  # type: ignore[no-any-return]
            outcome, reason = Outcome.HUNG, f"no end within {LIMIT_S:.0f} s of processor time"
        except (EOFError, OSError):
            self.process.join()
            outcome, reason = Outcome.DIED, f"exit status {self.process.exitcode}"
        self.renew()
        return Result(case, outcome, "", reason)

    def run_anew(self, case: Case) -> Result:
        """The case in a fresh process."""
        self.renew()
        return self.run(case)

    def reduced(self, result: Result) -> Result:
        """The finding with as few of its mutations as still lead to one of that kind."""
        steps = result.case.steps
        for step in steps:
            fewer = dataclasses.replace(result.case, steps=tuple(s for s in result.case.steps if s != step))
            tried = self.run(fewer)
            if tried.kind == result.kind:
                result = tried
        return result

    def _used(self) -> float:
        """Seconds of processor time of the worker and of the processes it waited for."""
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii", errors="replace")
            return sum(map(int, text.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def run_cases(cases: Iterator[Case], seeds: Sequence[Seed], workers: int) -> Iterator[tuple[Result, int]]:
    """Results as they come, each finding confirmed, with the peak of resident memory of its worker so far (bytes)."""
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(Lane(seeds)) for _ in range(workers)]

        def judge(lane: Lane, case: Case) -> Result:
            result = lane.run(case)
            return lane.run_anew(case) if result.outcome in _OF_THE_PROCESS else result

        for result, lane in spread(cases, lanes, judge):
            yield result, lane.peak


# -- the table -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What a run has seen: how many cases ended how and in which phase, and every finding."""

    outcomes: collections.Counter[Outcome] = dataclasses.field(default_factory=collections.Counter)
    phases: collections.Counter[tuple[Outcome, str]] = dataclasses.field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    findings: dict[str, list[Result]] = dataclasses.field(default_factory=dict)
    peak: int = 0

    @property
    def cases(self) -> int:
        return self.outcomes.total()

    def add(self, result: Result, peak: int) -> None:
        self.outcomes[result.outcome] += 1
        self.phases[result.outcome, result.phase] += 1
        self.peak = max(self.peak, peak)
        if result.outcome is Outcome.REFUSED:
            self.reasons[result.reason.partition(":")[0]] += 1
        elif result.outcome in FINDINGS:
            self.findings.setdefault(result.kind, []).append(result)


def report(tally: Tally, seeds: int, first: int, seconds: float) -> str:
    """What was tried, and how it ended, for people."""
    phases = ("read", "transform", "calibrate", "quantize and write", "verify", "plan memory", "finish")
    schemes = ", ".join(_SCHEMES)
    rows = [
        f"| {outcome.value} | {tally.outcomes[outcome]} | "
        + " | ".join(str(tally.phases[outcome, phase] or "") for phase in phases)
        + " |"
        for outcome in Outcome
    ]
    reasons = ", ".join(f"{name} {count}" for name, count in tally.reasons.most_common())
    found = [f"- {len(each)} x {kind}: `{each[0].case}`: {each[0].reason}" for kind, each in tally.findings.items()]
    return "\n".join(
        [
            "# Damaged ONNX files into the compiler",
            "",
            f"{tally.cases} cases from {seeds} seed models (seed {first}), each under one of {schemes};",
            f"one in {TO_THE_END} was compiled to the end, the others to the end of the verification, which loads and",
            f"runs source and result, each run for at most {RUN_LIMIT_S} s. Of the {HOST_MEMORY >> 20} MiB of "
            "--host-memory,",
            f"at most {tally.peak >> 20} were resident. {seconds:.0f} s. Made by `python -m bench.fuzz_import --save`.",
            "",
            "| how it ended | cases | in " + " | ".join(phases) + " |",
            "|" + "---|" * (len(phases) + 2),
            *rows,
            "",
            f"Refusals: {reasons}.",
            "",
            *(found or ["No findings."]),
            "",
            measured_on(describe_machine("onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy")),
            "",
        ]
    )


def _show(case: Case, seeds: Sequence[Seed], target: Path | None) -> None:
    """One case: where it comes from, how it ends, and with which of its mutations alone it still ends so."""
    made = make(case, seeds)
    print(f"{made.origin}: {', '.join(made.mutations)}")
    with Lane(seeds) as lane:
        result = lane.run(case)
        print(f"{result.kind}\n{result.reason}")
        if result.outcome in FINDINGS:
            case = lane.reduced(result).case
            print(f"reduced to {case}: {', '.join(make(case, seeds).mutations)}")
    if target:
        made = make(case, seeds)
        target.write_bytes(made.model)
        if made.weights:
            target.with_name(WEIGHTS).write_bytes(made.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--steps", help="of that case only these mutations: 0,2")
    parser.add_argument("--write", type=Path, help="where to write that case's model; its weights beside it")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULT.name}")
    options = parser.parse_args()
    seeds = make_seeds()
    if options.case is not None:
        case = whole_case(options.seed, options.case)
        if options.steps:
            case = dataclasses.replace(case, steps=tuple(map(int, options.steps.split(","))))
        _show(case, seeds, options.write)
        return
    started, tally = time.monotonic(), Tally()
    for result, peak in run_cases(
        (whole_case(options.seed, number) for number in range(options.count)), seeds, options.workers
    ):
        tally.add(result, peak)
        if result.outcome in FINDINGS:
            print(f"{result.case}: {result.kind}: {result.reason}", flush=True)
        if tally.cases % 1000 == 0:
            print(f"{tally.cases} of {options.count}", file=sys.stderr, flush=True)
    text = report(tally, len(seeds), options.seed, time.monotonic() - started)
    print(text)
    if options.save:
        RESULT.write_text(text)
    sys.exit(1 if tally.findings else 0)


if __name__ == "__main__":
    main()
