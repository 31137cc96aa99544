"""From a bundle's folder to an engine that is warm, and that has seen what passes take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from agent.engine.channel import Load, Run, RunError, Slab
from agent.engine.passes import Engine
from agent.engine.quiet import on_one_core
from agent.errors import AgentError
from targets.bundle import Manifest, Residency, read_manifest, safe_path
from targets.errors import BundleError
from targets.tensor import DType, TensorSpec, human

# Measuring ends when it has taken a fifth of loading, which a model that computes long gets, or so many seconds.
_MEASURE_SHARE, _MEASURE_S = 0.2, 0.3
# The least of a few: what takes longer is the machine's noise, which is learned where it matters, under load.
_MEASURE_TIMES = 3


@dataclass(frozen=True)
class Loaded:
    """An engine, what its first pass over the sample took (s, 0 without one), (rows, seconds) of later ones, and bytes
    of the sample."""

    engine: Engine
    warm_s: float = 0.0
    costs: tuple[tuple[int, float], ...] = ()
    sample_bytes: int = 0


def manifest_of(message: Load) -> Manifest:
    """Of the bundle that is to be loaded. Raises BundleError when it is not what the gateway verified."""
    manifest = read_manifest(Path(message.folder))
    if manifest.digest != message.digest:
        raise BundleError("the bundle changed after it was verified", "start the agent again")
    return manifest


def load(message: Load, manifest: Manifest, slab: Slab) -> Loaded:
    """Load the bundle; warm it up and measure it in the slot that the message names, if any. Raises TightfitError."""
    started = time.perf_counter()
    folder = Path(message.folder)
    residencies = [Residency(value) for value in message.residencies]
    finalised = Path(message.finalised) if message.finalised else None
    with on_one_core() if message.quiet else contextlib.nullcontext():
        engine = Engine(folder, manifest, message.threads, slab, residencies, finalised)
    loading_s = time.perf_counter() - started
    if message.sample_slot is None or (manifest.contract.inputs and not manifest.sample):
        return Loaded(engine)
    run = put_sample(folder, manifest, slab, message.sample_slot)
    warm_s = warm_up(engine, run)
    costs = measure(engine, manifest, run, warm_s, min(_MEASURE_SHARE * loading_s, _MEASURE_S))
    return Loaded(engine, warm_s, costs, sum(run.nbytes))


def put_sample(folder: Path, manifest: Manifest, slab: Slab, slot: int) -> Run:
    """Put the bundle's sample into the slot. Raises BundleError when it does not fit."""
    samples = {sample.name: sample for sample in manifest.sample}
    shapes, nbytes = [], []
    manifest.contract.check_inputs({s.name: (manifest.contract.input(s.name).dtype, s.shape) for s in manifest.sample})
    for index, spec in enumerate(manifest.contract.inputs):
        path = safe_path(folder, samples[spec.name].file)
        size = path.stat().st_size
        region = slab.input(slot, index)
        expected = _dense_nbytes(spec, samples[spec.name].shape)
        if size > region.nbytes or expected not in (None, size):
            raise BundleError(
                f"the bundle's own sample does not run: that of input {spec.name!r} has {human(size)}, "
                "which does not fit its shape"
            )
        with path.open("rb") as file:
            file.readinto(region[:size].data)
        shapes.append(samples[spec.name].shape)
        nbytes.append(size)
    return Run(0, slot, tuple(shapes), tuple(nbytes), tuple(range(len(manifest.contract.outputs))))


def _dense_nbytes(spec: TensorSpec, shape: tuple[int, ...]) -> int | None:
    if spec.dtype is DType.STRING:
        return None
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(spec.dtype.numpy).itemsize


def warm_up(engine: Engine, sample: Run) -> float:
    """Run the sample once, so that the first request pays for nothing; seconds. Raises AgentError when it fails."""
    passed, (reply,) = engine.run([[sample]])
    if isinstance(reply, RunError):
        raise AgentError(f"the bundle's own sample does not run: {reply.message}")
    return passed.pass_s


def measure(
    engine: Engine, manifest: Manifest, sample: Run, warm_s: float, limit_s: float
) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of passes over batches of the sample, of one row or more, while they take `limit_s` in all.

    Where that is not enough for one, the pass that warmed up is what there is: all of the sample, in `warm_s`.
    """
    own = max(sample.shapes[0][0], 1) if manifest.contract.batch_rows else 1
    costs: dict[int, float] = {}
    left_s, expected_s = limit_s, warm_s
    for rows in _numbers(min(manifest.contract.batch_rows, manifest.plan.slots * own)):
        batch = [_first_rows(sample, own, min(own, rows - start)) for start in range(0, rows, own)]
        seen: list[float] = []
        while len(seen) < _MEASURE_TIMES and left_s > expected_s:
            passed, _ = engine.run([batch])
            seen.append(passed.pass_s)
            left_s -= passed.pass_s
        if not seen:
            break
        costs[rows] = min(seen)
        # A batch of twice the rows takes twice as long at the most.
        expected_s = 2 * costs[rows]
    return tuple(costs.items()) or ((own, warm_s),)


def _first_rows(sample: Run, own: int, rows: int) -> Run:
    """Of the sample's `own` rows the first: every input begins with them."""
    if rows == own:
        return sample
    shapes = tuple((rows, *shape[1:]) for shape in sample.shapes)
    return msgspec.structs.replace(sample, shapes=shapes, nbytes=tuple(n // own * rows for n in sample.nbytes))


def _numbers(most: int) -> Iterator[int]:
    """1, 2, 4, 8 ... and `most`."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield max(most, 1)
