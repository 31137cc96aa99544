"""What a board makes of a bundle once: every weight as this runtime's kernels want it on this CPU, in files to map.

CACHE/NAME-DIGEST-MACHINE/
  finalised.json     `Finalised`, the journal: a segment is there when it is listed, with the files it lists
  00.onnx            the first segment's graph, as the runtime optimized it
  00.onnx.bin        its weights, as the bundle has them and as the kernels want them
  building/          the segment being made: worth nothing to anybody

Theory of operation. Segments are laid out one after the other, each in a process of its own, so that memory is that
of one. A segment is made in building/, synced, renamed into place, and only then listed: the journal is replaced by a
rename too. Whatever moment the power goes, what is listed is whole, and the next run goes on from there. The folder's
name holds the bundle's digest and that of runtime and CPU, so nothing is ever used for what it was not made for. One
process at a time builds in a folder: it holds a lock on it, which ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.cpu import Cpu, this_cpu
from agent.engine.host import describe_exit
from agent.errors import AgentError
from agent.external_data import external_bytes
from agent.models import Model
from agent.runtimes import installed
from targets.bundle import NAME, FileEntry, check_regular, file_sha256, safe_path
from targets.errors import BundleError, TightfitError
from targets.tensor import human

SCHEMA = 1
JOURNAL = "finalised.json"
# A line for each file of each segment.
MAX_JOURNAL_BYTES = 16 << 20
STATE = "TIGHTFIT_STATE"
STATE_FOLDER = Path("/var/lib/tightfit")
# Weights as they are and as kernels want them: 2.0 for floats, 2.1 for INT8, 2.2 (blocks of 32) to 2.4 (of 16) for
# INT4, whose copy holds a scale and a sum for each block.
DISK_FACTOR = 2.4
# Graph, page alignment and the file system's own.
DISK_SLACK_BYTES = 1 << 20
_REPORT_S = 5.0
_BUILDING = "building"
# Where this very `agent` was imported from: the child must find the same one.
_ROOT = Path(__file__).parents[1]

Progress = Callable[[str], None]


class FinaliseError(AgentError):
    """What a bundle needs is not there, does not fit on the disk, or cannot be made."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What laid-out weights depend on beside the bundle."""

    runtime: str
    cpu: Cpu

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode([SCHEMA, self], order="sorted")).hexdigest()


class LaidOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment, by its position in the bundle, and the two files made of it."""

    step: int
    segment: str
    files: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)


class Finalised(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The journal. `total_bytes` is the storage that all segments take."""

    schema: int
    name: str
    bundle: str
    machine: Machine
    total_bytes: int
    segments: tuple[LaidOut, ...]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To the process that lays out one segment: make `target` and `target`.bin of the graph `source`."""

    runtime: str
    source: str
    target: str
    threads: int
    settings: dict[str, str]
    parent: int


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its answer: `error` is empty when the files are there and were loaded once; `peak_bytes` is its largest RSS."""

    runtime: str = ""
    peak_bytes: int = 0
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """What a run of `build` found and did. `built` segments are new; `peak_bytes` is the largest of their processes."""

    folder: Path
    finalised: Finalised
    built: tuple[int, ...]
    seconds: float
    peak_bytes: int


def this_machine(runtime: str) -> Machine:
    """The machine that the agent stands on. Raises BundleError when the runtime is not installed."""
    return Machine(installed(runtime), this_cpu())


# --- where things are


def caches(bundle: Path, cache: Path | None) -> list[Path]:
    """Folders that may hold what was made of the bundle, the one to write to first."""
    if cache is not None:
        return [cache.absolute()]
    state = Path(os.environ.get(STATE) or STATE_FOLDER).absolute()
    beside = bundle.with_name(bundle.name + ".finalised")
    first = [state, beside] if os.environ.get(STATE) or os.access(state, os.W_OK) else [beside, state]
    return [folder / "finalised" if folder == state else folder for folder in first]


def folder_of(model: Model, cache: Path, machine: Machine) -> Path:
    """Where in the cache everything made of this bundle on this machine is."""
    return cache / f"{model.name}-{model.digest[:16]}-{machine.digest[:12]}"


def laid_out_files(folder: Path, step: int) -> tuple[Path, Path]:
    """Graph and weights of the segment at position `step`."""
    graph = folder / f"{step:02d}.onnx"
    return graph, graph.with_name(graph.name + ".bin")


# --- what serve asks


def locate(model: Model, cache: Path | None) -> Path:
    """The folder that has every segment that needs laying out, each file as it was made.

    Raises FinaliseError, which names the command that makes it.
    """
    machine = this_machine(model.manifest.runtime)
    places = caches(model.folder, cache)
    for place in places:
        folder = folder_of(model, place, machine)
        finalised = _read(folder)
        if finalised is None or not set(model.to_lay_out) <= {entry.step for entry in finalised.segments}:
            continue
        for entry in finalised.segments:
            if entry.step in model.to_lay_out:
                damage = _damage(folder, entry)
                if damage:
                    raise FinaliseError(f"{model.name}: {damage}", f"run: {_command(model, cache)}")
        return folder
    raise FinaliseError(
        f"{model.name} keeps {len(model.to_lay_out)} of its {len(model.residencies)} segments in files that are made"
        f" on the board, and {_why_missing(model, places, machine)}",
        f"run: {_command(model, cache)}",
    )


def check_runtime(folder: Path, runtime: str) -> None:
    """Refuse files of another runtime than the one that was loaded. Raises FinaliseError."""
    finalised = _read(folder)
    if finalised is None or finalised.machine.runtime != runtime:
        made_by = finalised.machine.runtime if finalised else "nobody knows what"
        raise FinaliseError(f"the laid-out weights were made by {made_by}, and {runtime} is to use them")


def _command(model: Model, cache: Path | None) -> str:
    residency = "" if model.planned else f" --residency {model.residencies[0].value}"
    return f"tightfit-agent finalise {model.folder}{residency}" + (f" --cache {cache}" if cache else "")


def _why_missing(model: Model, places: Sequence[Path], machine: Machine) -> str:
    partly = [place for place in places if _read(folder_of(model, place, machine))]
    if partly:
        return f"{folder_of(model, partly[0], machine)} does not have all of them"
    other = next(stale(model, places, machine), None)
    return f"the ones that there are {_difference(other[1].machine, machine)}" if other else "they are not there yet"


def stale(model: Model, places: Sequence[Path], machine: Machine) -> Iterator[tuple[Path, Finalised]]:
    """What was made of this very bundle by another runtime or on another CPU."""
    own = {folder_of(model, place, machine) for place in places}
    for place in places:
        for folder in sorted(place.glob(f"{model.name}-{model.digest[:16]}-*")):
            finalised = _read(folder) if folder not in own else None
            if finalised is not None and finalised.bundle == model.digest:
                yield folder, finalised


def _difference(made: Machine, now: Machine) -> str:
    if made.runtime != now.runtime:
        return f"were made by {made.runtime}, this is {now.runtime}"
    if made.cpu.models != now.cpu.models or made.cpu.architecture != now.cpu.architecture:
        return "were made on another CPU"
    changed = sorted(set(made.cpu.features) ^ set(now.cpu.features))
    return f"were made on a CPU that differs in {', '.join(changed[:8])}"


# --- building


def build(model: Model, cache: Path | None, threads: int, progress: Progress) -> Report:
    """Lay out what the model needs and is not there yet, and verify the rest.

    `progress` hears a line now and then. Raises FinaliseError or BundleError; what was finished before stays.
    """
    started = time.monotonic()
    machine = this_machine(model.manifest.runtime)
    folder = folder_of(model, caches(model.folder, cache)[0], machine)
    with _locked(folder):
        shutil.rmtree(folder / _BUILDING, ignore_errors=True)
        finalised = _verified(model, folder, machine, progress)
        missing = [step for step in model.to_lay_out if step not in {entry.step for entry in finalised.segments}]
        if missing:
            _check_disk(model, folder, missing)
        peak = 0
        for number, step in enumerate(missing, 1):
            say = _prefixed(progress, f"segment {number} of {len(missing)}, {model.manifest.segments[step].file}: ")
            entry, outcome = _lay_out(model, folder, step, threads, say)
            if outcome.runtime != machine.runtime:
                raise FinaliseError(f"{outcome.runtime} was loaded, but {machine.runtime} is installed")
            finalised = _list(folder, finalised, entry)
            peak = max(peak, outcome.peak_bytes)
    return Report(folder, finalised, tuple(missing), time.monotonic() - started, peak)


def prune(model: Model, cache: Path | None) -> int:
    """Delete what other runtimes and CPUs made of this bundle, where this run would write; bytes freed."""
    freed = 0
    places = caches(model.folder, cache)[:1]
    for folder, finalised in list(stale(model, places, this_machine(model.manifest.runtime))):
        # The journal first: what is not listed is not there, should the deleting be cut short.
        (folder / JOURNAL).unlink()
        shutil.rmtree(folder)
        freed += finalised.total_bytes
    return freed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made and held by this process alone. Raises FinaliseError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FinaliseError(
            f"cannot write to {folder}: {error.strerror}", "choose another folder with --cache"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FinaliseError(f"another process is making {folder}", "wait for it to end") from None
        yield
    except OSError as error:
        raise FinaliseError(f"cannot write to {folder}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _verified(model: Model, folder: Path, machine: Machine, progress: Progress) -> Finalised:
    """The journal without those segments whose files are not what it says."""
    found = _read(folder)
    if found is None or found.bundle != model.digest or found.machine != machine:
        return Finalised(SCHEMA, model.name, model.digest, machine, 0, ())
    whole = []
    for entry in found.segments:
        damage = _damage(folder, entry)
        if damage:
            progress(f"{damage}; it is made again")
        else:
            whole.append(entry)
    return _with(found, whole)


def _with(finalised: Finalised, segments: Sequence[LaidOut]) -> Finalised:
    ordered = tuple(sorted(segments, key=lambda entry: entry.step))
    total = sum(entry.nbytes for entry in ordered)
    return msgspec.structs.replace(finalised, segments=ordered, total_bytes=total)


def predicted_bytes(model: Model, step: int) -> int:
    """The most that the segment's laid-out files take on the disk."""
    graph = safe_path(model.folder, model.manifest.segments[step].file)
    return int(DISK_FACTOR * (external_bytes(graph) + graph.stat().st_size)) + DISK_SLACK_BYTES


def _check_disk(model: Model, folder: Path, missing: Sequence[int]) -> None:
    needed = sum(predicted_bytes(model, step) for step in missing)
    available = _free_bytes(folder)
    if needed > available:
        raise FinaliseError(
            f"the disk of {folder.parent} is too small: {len(missing)} segments need {human(needed)},"
            f" {human(available)} are free",
            "free some space (tightfit-agent finalise --prune drops what other versions made), or use --cache",
        )


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _lay_out(model: Model, folder: Path, step: int, threads: int, say: Progress) -> tuple[LaidOut, Outcome]:
    """Make one segment's files and put them in place; they are not listed yet."""
    segment = model.manifest.segments[step]
    building = folder / _BUILDING
    building.mkdir()
    made = laid_out_files(building, step)
    order = Order(
        model.manifest.runtime, str(safe_path(model.folder, segment.file)), str(made[0]), threads, segment.settings,
        os.getpid(),
    )  # fmt: skip
    started = time.monotonic()
    try:
        outcome = _run(order, made[1], predicted_bytes(model, step), say)
        entry = LaidOut(step, segment.file, tuple(map(_settled, made)))
        for path, place in zip(made, laid_out_files(folder, step), strict=True):
            path.replace(place)
    except FinaliseError as error:
        if _free_bytes(folder) < DISK_SLACK_BYTES:
            raise FinaliseError(f"the disk of {folder.parent} is full ({error.message})") from None
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _sync(folder)
    say(f"{human(entry.nbytes)} in {time.monotonic() - started:.1f} s, {human(outcome.peak_bytes)} of memory at most")
    return entry, outcome


def _settled(path: Path) -> FileEntry:
    """A file that is on the disk, and what it is."""
    _sync(path)
    entry = FileEntry(path.name, path.stat().st_size, file_sha256(path))
    _sync(path)
    return entry


def _run(order: Order, weights: Path, predicted: int, say: Progress) -> Outcome:
    """Have a fresh process carry out the order, and say how far it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agent.engine.prepack"], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    data: bytes | None = msgspec.json.encode(order)
    try:
        while True:
            try:
                answer, _ = process.communicate(data, timeout=_REPORT_S)
                break
            except subprocess.TimeoutExpired:
                data = None
                written = weights.stat().st_size if weights.exists() else 0
                say(f"{human(written)} written, at most {human(predicted)} to come")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0 or not answer:
        raise FinaliseError(f"the process that laid out {Path(order.source).name} {describe_exit(process.returncode)}")
    outcome = msgspec.json.decode(answer, type=Outcome)
    if outcome.error:
        raise FinaliseError(outcome.error, outcome.hint)
    return outcome


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda line: progress(prefix + line)


# --- the journal


def _read(folder: Path) -> Finalised | None:
    """The journal; None when there is none, or none that this version understands."""
    path = folder / JOURNAL
    try:
        if check_regular(path, JOURNAL) > MAX_JOURNAL_BYTES:
            return None
        finalised = msgspec.json.decode(path.read_bytes(), type=Finalised)
    except (OSError, TightfitError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return finalised if finalised.schema == SCHEMA and NAME.fullmatch(finalised.name) else None


def _list(folder: Path, finalised: Finalised, entry: LaidOut) -> Finalised:
    """Replace the journal by one that has the segment too."""
    others = [other for other in finalised.segments if other.step != entry.step]
    finalised = _with(finalised, [*others, entry])
    temporary = folder / (JOURNAL + ".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(finalised, order="sorted"), indent=1) + b"\n")
    _sync(temporary)
    temporary.replace(folder / JOURNAL)
    _sync(folder)
    return finalised


def _damage(folder: Path, entry: LaidOut) -> str:
    """What is wrong with a listed segment's files, by size and SHA-256; empty when nothing is."""
    if tuple(file.path for file in entry.files) != tuple(path.name for path in laid_out_files(folder, entry.step)):
        return f"the journal of {folder} lists other files than it should"
    for file in entry.files:
        path = folder / file.path
        try:
            if check_regular(path, file.path) != file.nbytes:
                return f"laid-out file {path} has {path.stat().st_size} bytes instead of {file.nbytes}"
            if file_sha256(path) != file.sha256:
                return f"laid-out file {path} was changed: its SHA-256 differs"
        except (OSError, BundleError):
            return f"laid-out file {path} is gone, or is no plain file"
    return ""


def _sync(path: Path) -> None:
    """fsync(2) a file or a folder, and let its pages go: the page cache counts against the service's memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
