"""What was made of a bundle on the board: every weight as this runtime's kernels want it on this CPU, in files to map.

CACHE/NAME-DIGEST-MACHINE/
  finalised.json     `Finalised`, the journal: a segment is there when it is listed, with the files it lists
  00.onnx            the first segment's graph, as the runtime optimized it
  00.onnx.bin        its weights, as the bundle has them and as the kernels want them
  building/          the segment being made: worth nothing to anybody

The folder's name holds the bundle's digest and that of runtime and CPU, so that nothing is used for what it was not
made for. `agent.finalise` makes it; this module finds it, and says what is wrong with it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from agent.cpu import Cpu, this_cpu
from agent.errors import AgentError
from agent.models import Model
from agent.runtimes import installed
from targets.bundle import NAME, FileEntry, check_regular, file_sha256
from targets.errors import BundleError, TightfitError

SCHEMA = 1
JOURNAL = "finalised.json"
# A line for each file of each segment.
MAX_JOURNAL_BYTES = 16 << 20
STATE = "TIGHTFIT_STATE"
STATE_FOLDER = Path("/var/lib/tightfit")


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
        finalised = read_journal(folder)
        if finalised is None or not set(model.to_lay_out) <= {entry.step for entry in finalised.segments}:
            continue
        for entry in finalised.segments:
            if entry.step in model.to_lay_out:
                damage = damage_of(folder, entry)
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
    finalised = read_journal(folder)
    if finalised is None or finalised.machine.runtime != runtime:
        made_by = finalised.machine.runtime if finalised else "nobody knows what"
        raise FinaliseError(f"the laid-out weights were made by {made_by}, and {runtime} is to use them")


def _command(model: Model, cache: Path | None) -> str:
    residency = "" if model.planned else f" --residency {model.residencies[0].value}"
    return f"tightfit-agent finalise {model.folder}{residency}" + (f" --cache {cache}" if cache else "")


def _why_missing(model: Model, places: Sequence[Path], machine: Machine) -> str:
    partly = [place for place in places if read_journal(folder_of(model, place, machine))]
    if partly:
        return f"{folder_of(model, partly[0], machine)} does not have all of them"
    other = next(stale(model, places, machine), None)
    return f"the ones that there are {_difference(other[1].machine, machine)}" if other else "they are not there yet"


def stale(model: Model, places: Sequence[Path], machine: Machine) -> Iterator[tuple[Path, Finalised]]:
    """What was made of this very bundle by another runtime or on another CPU."""
    own = {folder_of(model, place, machine) for place in places}
    for place in places:
        for folder in sorted(place.glob(f"{model.name}-{model.digest[:16]}-*")):
            finalised = read_journal(folder) if folder not in own else None
            if finalised is not None and finalised.bundle == model.digest:
                yield folder, finalised


def _difference(made: Machine, now: Machine) -> str:
    if made.runtime != now.runtime:
        return f"were made by {made.runtime}, this is {now.runtime}"
    if made.cpu.models != now.cpu.models or made.cpu.architecture != now.cpu.architecture:
        return "were made on another CPU"
    changed = sorted(set(made.cpu.features) ^ set(now.cpu.features))
    return f"were made on a CPU that differs in {', '.join(changed[:8])}"


# --- the journal


def read_journal(folder: Path) -> Finalised | None:
    """The journal; None when there is none, or none that this version understands."""
    path = folder / JOURNAL
    try:
        if check_regular(path, JOURNAL) > MAX_JOURNAL_BYTES:
            return None
        finalised = msgspec.json.decode(path.read_bytes(), type=Finalised)
    except (OSError, TightfitError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return finalised if finalised.schema == SCHEMA and NAME.fullmatch(finalised.name) else None


def damage_of(folder: Path, entry: LaidOut) -> str:
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
