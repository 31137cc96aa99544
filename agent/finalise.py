"""Make of a bundle, once and on the board, what `agent.laid_out` describes.

Theory of operation. Segments are laid out one after the other, each in a process of its own, so that memory is that
of one. A segment is made in building/, synced, renamed into place, and only then listed: the journal is replaced by a
rename too. Whatever moment the power goes, what is listed is whole, and the next run goes on from there. One process
at a time builds in a folder: it holds a lock on it, which ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.engine.host import describe_exit
from agent.external_data import external_bytes
from agent.laid_out import (
    JOURNAL,
    SCHEMA,
    Finalised,
    FinaliseError,
    LaidOut,
    Machine,
    caches,
    damage_of,
    folder_of,
    laid_out_files,
    read_journal,
    stale,
    this_machine,
)
from agent.models import Model
from targets.bundle import FileEntry, file_sha256, safe_path
from targets.tensor import human

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
    found = read_journal(folder)
    if found is None or found.bundle != model.digest or found.machine != machine:
        return Finalised(SCHEMA, model.name, model.digest, machine, 0, ())
    whole = []
    for entry in found.segments:
        damage = damage_of(folder, entry)
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


def _sync(path: Path) -> None:
    """fsync(2) a file or a folder, and let its pages go: the page cache counts against the service's memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
