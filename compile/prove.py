"""Proof by force: the real agent runs a bundle under a hard memory limit, and its peak is set beside the plan.

The runtime's fixed cost F_rt is measured the same way, with a model of one operator, and taken off both sides, so that
what is compared is the model: its weights, its activations, its slots. Nothing is allowed for noise: of three
measurements of F_rt the middle one counts, and what the kernel saw beyond the largest sample counts as used.
"""

from __future__ import annotations

import contextlib
import enum
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from compile.errors import OptionError
from compile.graph import ir
from compile.limits import Charged, Limit, limited
from compile.options import Options
from compile.pipeline import compile_model
from compile.processes import Mapped
from compile.progress import Progress
from compile.sampler import LOAD, RUN, Peak, Sampler
from compile.serving import (
    Requests,
    Service,
    ServiceError,
    drop_from_page_cache,
    finalise_command,
    needs_finalise,
    serve_command,
    started,
)
from compile.speed import Speed, measure
from targets.board import Board, board_names, load_board
from targets.budget import FINALISE, KINDS, Phase, check_plan
from targets.bundle import Manifest, Residency, read_manifest, verify_files
from targets.errors import BoardError, BudgetError
from targets.tensor import human

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

FIXED_RUNS = 3
"""How often F_rt is measured; how much the measurements differ is part of the proof."""
NOTHING = Peak(Mapped(), Mapped(), (), 0, 0)
PROCESSES = ("gateway", "engine")
_NOT_INSTALLED = "is not installed"


class Verdict(str, enum.Enum):
    """What the run has shown."""

    FITS = "fits"
    OVER_PLAN = "over plan"
    """It ran under the limit, but needed more than its plan promises."""
    DOES_NOT_FIT = "does not fit"


class PhaseProof(msgspec.Struct, frozen=True):
    """One phase, bytes without F_rt. `measured` is None where the service did not get so far; where it ended within
    the phase, `complete` is false and the figures are those until then.

    `measured` is the moment of the largest sum; `own_peaks` are those of each kind by itself, which need not coincide;
    `anonymous` is that kind by process.
    `unseen` bounds what may have been missed: the kernel's own peak of each process above the largest that was seen of
    it, less the same of F_rt. It counts library pages too, and it is part of `measured_total`.
    """

    name: str
    predicted: dict[str, int]
    measured: dict[str, int] | None
    own_peaks: dict[str, int] | None = None
    anonymous: dict[str, int] = {}
    unseen: int = 0
    complete: bool = True

    @property
    def predicted_total(self) -> int:
        return sum(self.predicted.values())

    @property
    def measured_total(self) -> int | None:
        return None if self.measured is None else max(sum(self.measured.values()) + self.unseen, 0)

    @property
    def holds(self) -> bool:
        """Whether the plan was not exceeded."""
        return not self.complete or self.measured_total is None or self.measured_total <= self.predicted_total


class Fixed(msgspec.Struct, frozen=True):
    """F_rt: what the plan counts, and the largest that the service with a model of one operator had here (bytes).

    `libraries` is the proportional share of shared libraries, which depends on what else runs on the machine. `spread`
    is the most by which measurements of one phase, libraries aside, differ.
    """

    predicted: int
    anonymous: int
    libraries: int
    spread: int = 0

    @property
    def measured(self) -> int:
        return self.anonymous + self.libraries


class Proof(msgspec.Struct, frozen=True):
    """All that `prove` has found. `charged` is what the limit's mechanism counted, None where it does not count;
    `speed` is None where not all requests were answered."""

    model: str
    version: str
    target: str
    slots: int
    rounds: int
    limit_bytes: int
    mechanism: str
    exact: bool
    fixed: Fixed
    phases: tuple[PhaseProof, ...]
    charged: dict[str, int] | None
    oom_kills: int
    verdict: Verdict
    reason: str
    notes: tuple[str, ...]
    speed: Speed | None = None


class Run(msgspec.Struct, frozen=True):
    """One service from its start to its end: peaks by phase, and which phases were gone through.

    `failure` says what ended it early, `killed` which process was killed.
    """

    phases: dict[str, Peak]
    done: tuple[str, ...]
    charged: Charged | None
    oom_kills: int
    failure: str = ""
    killed: str = ""
    speed: Speed | None = None

    @property
    def ready(self) -> bool:
        """Whether the service was loaded and said so."""
        return LOAD in self.done


Limiter = Callable[[int], "AbstractContextManager[Limit]"]


def prove(
    bundle: Path,
    limit: int | None = None,
    rounds: int = 4,
    timeout_s: float = 3600.0,
    progress: Progress | None = None,
    limiter: Limiter = limited,
) -> Proof:
    """Run the bundle under `limit` bytes (by default its board's budget) and compare it with its plan.

    Every slot is filled `rounds` times at once with requests of the largest shape. `limiter` makes the limit.
    Raises BundleError, BudgetError or OptionError for what cannot be proved either way; a bundle that does not fit is
    no error but a verdict.
    """
    progress = progress or Progress()
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    check_plan(manifest.plan, manifest.plan.budget_bytes)
    progress.phase("check files", sum(entry.nbytes for entry in manifest.files))
    verify_files(bundle, manifest, progress.advance)
    nbytes = manifest.plan.budget_bytes if limit is None else limit
    with limiter(nbytes) as hard, _folders(bundle, manifest) as (folder, cache):
        if not hard.exact:
            progress.warn(_INEXACT.format(mechanism=hard.mechanism))
        progress.phase("measure the runtime alone")
        fixed = [measure_fixed(manifest, folder, timeout_s) for _ in range(FIXED_RUNS)]
        progress.phase(f"load and fill {manifest.plan.slots} slots under {human(nbytes)} ({hard.mechanism})")
        seen = run_service(bundle, manifest, hard, folder, cache, rounds, timeout_s)
    if _NOT_INSTALLED in seen.failure and not seen.done:
        raise OptionError(seen.failure)
    return _judge(manifest, hard, fixed, seen, rounds)


@contextlib.contextmanager
def _folders(bundle: Path, manifest: Manifest) -> Iterator[tuple[Path, Path | None]]:
    """A temporary folder, and where finalised weights go: on the bundle's own disk, because /tmp may be memory."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tightfit-prove-"))
        cache = None
        if needs_finalise(manifest):
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix=".tightfit-prove-", dir=bundle.parent))
        yield Path(folder), Path(cache) if cache else None


def measure_fixed(manifest: Manifest, folder: Path, timeout_s: float) -> Run:
    """The same service with a model of one operator and as many slots, not limited. Raises OptionError."""
    out = folder / "empty.tfb"
    if not out.exists():
        compile_model(_one_operator(folder), _board_of(manifest), out, Options(slots=manifest.plan.slots))
    cache = Path(tempfile.mkdtemp(prefix="finalised-", dir=folder)) if needs_finalise(manifest) else None
    run = run_service(out, read_manifest(out), None, folder, cache, 2, timeout_s, Residency.MAPPED)
    if run.failure:
        raise OptionError(f"the agent cannot serve here: {run.failure}")
    return run


def _one_operator(folder: Path) -> Path:
    """An ONNX file: what remains of its service is the runtime."""
    x, y = (ir.Value(name=n, shape=ir.Shape([1, 4]), type=ir.TensorType(ir.DataType.FLOAT)) for n in ("x", "y"))
    graph = ir.Graph([x], [y], nodes=[ir.Node("", "Relu", [x], outputs=[y])], opset_imports={"": 17}, name="empty")
    path = folder / "empty.onnx"
    ir.save(ir.Model(graph, ir_version=8), path)
    return path


def _board_of(manifest: Manifest) -> Board:
    """The bundle's board where it is a known one, else any with its runtime: the model of one operator fits each."""
    try:
        return load_board(manifest.target)
    except BoardError:
        boards = map(load_board, board_names())
        board = next((each for each in boards if each.runtime.name == manifest.runtime), None)
        if board is None:
            raise
        return board


def run_service(
    bundle: Path,
    manifest: Manifest,
    limit: Limit | None,
    folder: Path,
    cache: Path | None,
    rounds: int,
    timeout_s: float,
    residency: Residency | None = None,
) -> Run:
    """Finalise into `cache` if there is one, serve, fill all slots `rounds` times, end; what was seen and went wrong.

    `residency` is what `finalise` is told where the bundle does not say so itself.
    """
    requests = Requests(bundle, manifest, rounds * manifest.plan.slots)
    drop_from_page_cache(bundle, manifest)
    charged = limit.charged if limit else lambda: None
    weights = (bundle, cache.resolve()) if cache else (bundle,)
    phases: dict[str, Peak] = {}
    done: list[str] = []
    failure = killed = ""
    counted: Charged | None = None
    speed: Speed | None = None

    def watch(command: list[str], task: Callable[[Service, Sampler], None], *names: str) -> None:
        nonlocal failure, killed, counted
        with started(command, limit, folder) as service:
            with Sampler(service.process.pid, weights, charged) as sampler:
                try:
                    task(service, sampler)
                except ServiceError as error:
                    failure = str(error)
            killed = ("gateway" if service.was_killed else "engine") if limit and limit.oom_kills() else ""
        phases.update({name: sampler.peak(phase) for name, phase in zip(names, (LOAD, RUN), strict=False)})
        counted = counted.largest(sampler.charged) if counted and sampler.charged else sampler.charged

    def finalise(service: Service, _: Sampler) -> None:
        service.wait_end(timeout_s)
        done.append(FINALISE)

    def serve(service: Service, sampler: Sampler) -> None:
        nonlocal speed
        service.wait_ready(timeout_s)
        done.append(LOAD)
        sampler.serving()
        speed = measure(service, manifest, requests, rounds, timeout_s)
        done.append(RUN)

    if cache:
        watch(finalise_command(bundle, cache, residency), finalise, FINALISE)
    if not failure:
        # What the empty bundle was finalised for, it is not served from: it has nothing to map.
        watch(serve_command(bundle, folder, None if residency else cache, timeout_s), serve, LOAD, RUN)
    return Run(phases, tuple(done), counted, limit.oom_kills() if limit else 0, failure, killed, speed)


def _judge(manifest: Manifest, limit: Limit, runs: Sequence[Run], seen: Run, rounds: int) -> Proof:
    """Set what was seen beside the plan, and say what that means."""
    plan = manifest.plan
    fixed = {name: [run.phases[name] for run in runs] for name in runs[0].phases}
    middle = {name: sorted(peaks, key=lambda peak: peak.nbytes)[len(peaks) // 2] for name, peaks in fixed.items()}
    phases = tuple(
        _phase(phase, middle.get(phase.name, NOTHING), seen.phases.get(phase.name, NOTHING), seen.done)
        for phase in plan.phases
    )
    runtime = plan.phase(RUN).term("runtime")
    cost = Fixed(
        runtime.nbytes if runtime else 0,
        max(peak.own.anonymous for peaks in fixed.values() for peak in peaks),
        max(peak.own.libraries for peaks in fixed.values() for peak in peaks),
        max(max(p.nbytes for p in peaks) - min(p.nbytes for p in peaks) for peaks in fixed.values()),
    )
    verdict, reason = _verdict(manifest, limit, seen, phases)
    return Proof(
        model=manifest.name,
        version=manifest.version,
        target=manifest.target,
        slots=plan.slots,
        rounds=rounds,
        limit_bytes=limit.nbytes,
        mechanism=limit.mechanism,
        exact=limit.exact,
        fixed=cost,
        phases=phases,
        charged=None if seen.charged is None else _charged(seen.charged),
        oom_kills=seen.oom_kills,
        verdict=verdict,
        reason=reason,
        notes=tuple(_notes(limit, cost, phases, seen)),
        speed=seen.speed,
    )


def _charged(charged: Charged) -> dict[str, int]:
    return {"anonymous": charged.anonymous, "file": charged.file, "shared": charged.shared, "peak": charged.peak}


def _phase(phase: Phase, fixed: Peak, seen: Peak, done: tuple[str, ...]) -> PhaseProof:
    runtime = phase.term("runtime")
    taken = {runtime.kind: runtime.nbytes} if runtime else {}
    predicted = {kind: phase.kind_bytes(kind) - taken.get(kind, 0) for kind in KINDS}
    if not seen.samples:
        return PhaseProof(phase.name, predicted, None, complete=False)
    base = _kinds(fixed.at)
    measured = {kind: nbytes - base[kind] for kind, nbytes in _kinds(seen.at).items()}
    own = {kind: nbytes - base[kind] for kind, nbytes in _kinds(seen.own).items()}
    unseen = max(seen.unseen - fixed.unseen, 0)
    parts = {name: a - b for name, a, b in zip(PROCESSES, seen.anonymous, fixed.anonymous, strict=False)}
    return PhaseProof(phase.name, predicted, measured, own, parts, unseen, phase.name in done)


def _kinds(seen: Mapped) -> dict[str, int]:
    """By the kinds of a plan."""
    return {"anonymous": seen.anonymous, "file": seen.weights, "shared": seen.shared}


def _verdict(manifest: Manifest, limit: Limit, seen: Run, phases: tuple[PhaseProof, ...]) -> tuple[Verdict, str]:
    """(verdict, one line that says why). Raises BudgetError when the agent refused for another reason than memory."""
    where = f"under {human(limit.nbytes)} ({limit.mechanism})"
    if seen.oom_kills:
        times = "once" if seen.oom_kills == 1 else f"{seen.oom_kills} times"
        when = "while it served requests" if seen.ready else "before it was ready"
        said = f"; the agent said: {seen.failure}" if seen.killed == "engine" and seen.failure else ""
        return Verdict.DOES_NOT_FIT, f"the kernel's OOM killer ended the {seen.killed} {when} {where} ({times}){said}"
    if seen.failure and (seen.ready or not limit.exact):
        when = "a request failed" if seen.ready else "it did not start"
        return Verdict.DOES_NOT_FIT, f"{when} {where}: {seen.failure}"
    if seen.failure:
        raise BudgetError(f"the agent refused the bundle, which says nothing about memory: {seen.failure}")
    over = next((phase for phase in phases if not phase.holds), None)
    if over is not None:
        total = over.measured_total or 0
        return Verdict.OVER_PLAN, (
            f"it ran {where}, but {over.name} needed {human(total)}, {human(total - over.predicted_total)} more than "
            f"its plan; please report this model"
        )
    return Verdict.FITS, f"loaded and answered {manifest.plan.slots} requests at a time {where}, within its plan"


_INEXACT = (
    "no cgroup can be made here, so the limit is {mechanism}: address space of each process alone, not memory; the "
    "page cache and the shared slab are not limited. Run as root, or under `systemd-run --user --scope -p Delegate=yes`"
)


def _notes(limit: Limit, fixed: Fixed, phases: tuple[PhaseProof, ...], seen: Run) -> list[str]:
    """What a reader of the figures must know to read them right."""
    notes = [
        "measured: anonymous = private pages of both processes; file = resident pages of the bundle's weight files; "
        "shared = the slab that requests travel in. All without F_rt."
    ]
    if not limit.exact:
        notes.append(_INEXACT.format(mechanism=limit.mechanism) + ".")
    if seen.charged is not None:
        notes.append(
            "the cgroup's peak also holds F_rt and the page cache of files that were only read (every file's digest is "
            "checked at start), which the kernel drops before it kills; it does not hold pages of libraries that "
            "another process had in memory before."
        )
    if fixed.measured > fixed.predicted:
        notes.append(
            f"the runtime alone took {human(fixed.measured)} here, the plan counts {human(fixed.predicted)} for it: "
            "set runtime_fixed_mib of the board to what it takes there."
        )
    run = phases[-1]
    untouched = run.predicted["file"] - run.measured["file"] if run.complete and run.measured else 0
    if untouched > run.predicted_total // 50:
        notes.append(
            f"{human(untouched)} of the mapped weights were never touched: tables of which so many requests read no "
            "more. The plan counts them whole; the kernel can drop them."
        )
    return notes
