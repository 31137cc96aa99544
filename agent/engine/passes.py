"""Passes over a loaded bundle: batches of runs go through its segments, from slots of the slab and back into them.

Theory of operation. Each batch of a pass is one computation: inputs of its runs stand one after the other along axis 0,
and rows of the outputs go back to whom they belong. Where the contract can pad, shorter runs are filled up with zeros
to the longest of the batch, and what comes of the zeros is cut off. One run alone is read where it stands, in its slot;
several are copied into `staging`, which was allocated when the bundle was loaded and is counted by its plan. What
cannot be put together (no batch dimension, strings, other shapes, no room) is computed run by run, and so is a batch
that fails, so that a bad run fails alone.

Where weights are streamed, all parts of a pass go through a segment before the next one is brought in, so that it is
brought in once; what each holds meanwhile is copied out of the arena, into memory that the plan counts. Elsewhere one
part after the other goes through all segments, since together they would only hold more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from msgspec import UNSET

from agent import log
from agent.backends.base import ArenaOptions, Array, BackendError, Session, SessionOptions, open_backend
from agent.engine.channel import ALIGN, Bytes, Done, Passed, Run, RunError, Slab
from agent.engine.residency import Sessions, Source, trim_heap
from agent.errors import AgentError, Reason, RefusedError
from agent.laid_out import check_runtime, laid_out_files
from agent.strings import pack_strings, unpack_strings
from targets.budget import BATCH, MemoryPlan
from targets.bundle import Manifest, Residency, Segment, safe_path
from targets.errors import TightfitError
from targets.tensor import DType, human, nbytes

Batch = Sequence[Run]
# Clients mostly ask for the same outputs: which segments make them is kept for so many sets of them.
_KEPT_SETS = 64


class Engine:
    """A loaded bundle: one session per segment, run in order, values passed on by name."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int,
        slab: Slab,
        residencies: Sequence[Residency] = (),
        finalised: Path | None = None,
    ) -> None:
        """Load it. `residencies` (one a segment; the manifest's when empty) win over the manifest's.

        `finalised` is the folder of those that are laid out. Raises BackendError or FinaliseError.
        """
        self._contract = manifest.contract
        self._segments = manifest.segments
        self._slab = slab
        backend = open_backend(manifest.runtime)
        backend.prepare(_arena(manifest.plan))
        self.runtime = backend.describe()
        if finalised:
            check_runtime(finalised, self.runtime)
        residencies = residencies or [segment.residency for segment in self._segments]
        sources = [
            _source(folder, finalised, step, segment, SessionOptions(threads, segment.settings, residency))
            for step, (segment, residency) in enumerate(zip(self._segments, residencies, strict=True))
        ]
        self._sessions = Sessions(backend, sources)
        self._streams = Residency.STREAMED in residencies
        self._last_use = _last_uses(self._segments)
        self._index = {spec.name: index for index, spec in enumerate(self._contract.outputs)}
        # Of every pair of state the output of its input, and the other way round: those whose places swap roles.
        self._pairs = self._contract.pairs
        self._turned = {output: index for index, output in self._pairs.items()}
        self._input_types = [np.dtype(spec.dtype.numpy) for spec in self._contract.inputs]
        self._output_types = [np.dtype(spec.dtype.numpy) for spec in self._contract.outputs]
        self._needed = lru_cache(_KEPT_SETS * len(self._segments))(self._outputs_needed)
        self._staging = _Staging(manifest)
        self._counted_bytes = 0
        self._log = log.get("engine")
        # Loading leaves behind what optimizing the graphs took.
        trim_heap()

    def close(self) -> None:
        """Close every session."""
        self._sessions.close()

    def run(self, batches: Sequence[Batch]) -> tuple[Passed, list[Done | RunError]]:
        """One pass: run what stands in the slots and leave the outputs there. One answer for each run, in their order.

        A run that fails fails alone: that is its answer, and the others go on.
        """
        started = time.perf_counter()
        together = [batches] if self._streams else [[batch] for batch in batches]
        answers = [answer for some in together for answer in self._run(some)]
        return Passed(time.perf_counter() - started, self._newly_streamed()), answers

    def _newly_streamed(self) -> int:
        """Bytes brought in since the last call."""
        before, self._counted_bytes = self._counted_bytes, self._sessions.streamed_bytes
        return self._counted_bytes - before

    def _run(self, batches: Sequence[Batch]) -> list[Done | RunError]:
        """Batches whose inputs are in memory together; their parts only where weights come once for all."""
        self._staging.clear()
        parts = [part for batch in batches for part in self._staging.parts(batch)]
        together = [parts] if self._streams else [[part] for part in parts]
        return [answer for some in together for answer in self._sweep(some)]

    def _sweep(self, parts: Sequence[Batch]) -> list[Done | RunError]:
        """Once through all segments."""
        going = []
        for part in parts:
            each = _Going(part, waits=len(parts) > 1)
            going.append(each)
            try:
                self._read_inputs(each)
            except Exception as error:  # noqa: BLE001 - one bad run must not end the engine
                each.fail(error)
        for step in range(len(self._segments)):
            self._take_turn(step, [each for each in going if each.error is None])
        return [answer for each in going for answer in self._answers(each)]

    def _answers(self, ended: _Going) -> list[Done | RunError]:
        if ended.error is None or len(ended.batch) == 1:
            return ended.answers()
        self._log.debug("a batch failed, its runs are tried one by one", runs=len(ended.batch))
        return [answer for run in ended.batch for answer in self._sweep([[run]])]

    def _take_turn(self, step: int, together: Sequence[_Going]) -> None:
        needing = [each for each in together if self._needed(step, each.wanted)]
        if needing:
            try:
                with self._sessions.turn(step) as session:
                    for each in needing:
                        try:
                            self._run_segment(step, session, each)
                        except Exception as error:  # noqa: BLE001 - as above
                            each.fail(error)
                    if all(each.error for each in needing):
                        # The turn must not pass for one that shows what a run reads.
                        raise BackendError("every run of this pass failed")
            except Exception as error:  # noqa: BLE001 - the pages may not have come
                for each in needing:
                    each.fail(error)
        for each in together:
            self._forget(step, each)

    def _outputs_needed(self, step: int, wanted: frozenset[int]) -> list[str]:
        """Of the segment's outputs, those that somebody reads."""
        return [
            name
            for name in self._segments[step].outputs
            if self._index.get(name) in wanted or self._last_use.get(name, -1) > step
        ]

    def _wants(self, going: _Going, name: str) -> bool:
        return self._index.get(name) in going.wanted

    def _run_segment(self, step: int, session: Session, going: _Going) -> None:
        outputs = self._needed(step, going.wanted)
        values = session.run({name: going.values[name] for name in self._segments[step].inputs}, outputs)
        self._forget(step, going)
        for name, value in zip(outputs, values, strict=True):
            if self._wants(going, name):
                # At once, so that outputs never wait beside what others make.
                self._write_output(self._index[name], value, going)
            if self._last_use.get(name, -1) > step:
                going.values[name] = value.copy() if going.waits else value

    def _forget(self, step: int, going: _Going) -> None:
        """Let go of what no later segment reads."""
        for name in self._segments[step].inputs:
            if self._last_use[name] == step:
                going.values.pop(name, None)

    # --- slots

    def _read_inputs(self, going: _Going) -> None:
        for index, (spec, dtype) in enumerate(zip(self._contract.inputs, self._input_types, strict=True)):
            if going.alike:
                value = self._read_alike(index, dtype, going)
            else:
                parts = [self._read(index, dtype, run) for run in going.batch]
                value = parts[0] if len(parts) == 1 else self._staging.put_together(parts)
            going.values[spec.name] = value
            if self._wants(going, spec.name):
                self._write_output(self._index[spec.name], value, going)

    def _read_alike(self, index: int, dtype: np.dtype[np.generic], going: _Going) -> Array:
        first = going.batch[0]
        shape, size = first.shapes[index], first.nbytes[index]
        places = self._slab.inputs(index)[:, :size]
        regions = [places[slot] for slot in going.slots]
        return self._staging.join(regions, dtype, (len(regions) * shape[0], *shape[1:]))

    def _read(self, index: int, dtype: np.dtype[np.generic], run: Run) -> Array:
        turned = self._pairs.get(index) if run.turn else None
        region = self._slab.input(run.slot, index) if turned is None else self._slab.output(run.slot, turned)
        shape = run.shapes[index]
        if dtype.hasobject:
            items = unpack_strings(region[: run.nbytes[index]].data, math.prod(shape))
            return np.array([item.decode("utf-8") for item in items], dtype=object).reshape(shape)
        value: Array = np.ndarray(shape, dtype, region)
        return value

    def _write_output(self, index: int, value: Array, going: _Going) -> None:
        """Take the value apart: to each run its rows, if it asked for them."""
        spec = self._contract.outputs[index]
        value = np.asarray(value)
        if value.dtype != self._output_types[index]:
            raise BackendError(f"output {spec.name!r} came as {value.dtype}, the bundle promises {spec.dtype.value}")
        if len(going.batch) == 1:
            self._write(index, going.batch[0], value.shape, _bytes_of(value, spec.dtype), going)
            return
        count = sum(run.shapes[0][0] for run in going.batch)
        if value.ndim == 0 or value.shape[0] != count:
            raise BackendError(f"{count} rows gave output {spec.name!r} of shape {list(value.shape)}")
        if going.alike:
            self._write_alike(index, value, going)
            return
        pad = self._contract.pad
        axis = None if pad is UNSET else pad.axes[index]
        data, width, start = _bytes_of(value, spec.dtype), value.nbytes // max(count, 1), 0
        for run in going.batch:
            rows = run.shapes[0][0]
            if index in run.outputs:
                shape, own = (rows, *value.shape[1:]), data[start * width : (start + rows) * width]
                if pad is not UNSET and axis is not None:
                    # What comes of the run's own inputs.
                    size = self._contract.size_of(pad.dim, run.shapes)
                    cut = own.view(value.dtype).reshape(shape)[(slice(None),) * axis + (slice(size),)]
                    shape, own = cut.shape, _bytes_of(cut, spec.dtype)
                self._write(index, run, shape, own, going)
            start += rows

    def _write_alike(self, index: int, value: Array, going: _Going) -> None:
        runs = len(going.batch)
        rows = _bytes_of(value, self._contract.outputs[index].dtype).reshape(runs, -1)
        places = self._slab.outputs(index)
        self._check_room(index, rows.shape[1], places.shape[1])
        places[going.slots, : rows.shape[1]] = rows
        going.written[index] = index, (len(value) // runs, *value.shape[1:]), rows.shape[1]

    def _write(self, index: int, run: Run, shape: tuple[int, ...], data: Bytes, going: _Going) -> None:
        turned = self._turned.get(index) if run.turn else None
        region = self._slab.output(run.slot, index) if turned is None else self._slab.input(run.slot, turned)
        self._check_room(index, data.nbytes, region.nbytes)
        region[: data.nbytes] = data
        going.written[run.id, index] = index, shape, data.nbytes

    def _check_room(self, index: int, needed: int, room: int) -> None:
        if needed > room:
            raise RefusedError(
                Reason.OUTPUT_TOO_LARGE,
                f"output {self._contract.outputs[index].name!r} has {human(needed)}, "
                f"the bundle's plan has room for {human(room)}",
            )


def _bytes_of(value: Array, dtype: DType) -> Bytes:
    """The value as it stands in a slot."""
    if dtype is DType.STRING:
        return np.frombuffer(pack_strings(str(item).encode("utf-8") for item in value.ravel()), np.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class _Staging:
    """Room for the inputs of batches, as much as the plan counts; none where it counts none."""

    def __init__(self, manifest: Manifest) -> None:
        self._contract = manifest.contract
        self._most_rows = manifest.contract.batch_rows
        room = manifest.plan.phase("run").nbytes(BATCH) if self._most_rows else 0
        # Written now, so that memory is short here and not in the middle of a request.
        self._bytes: Bytes = np.full(room and room + ALIGN * len(manifest.contract.inputs), 0, np.uint8)
        self._taken = 0

    def clear(self) -> None:
        """Have room for all again."""
        self._taken = 0

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch whole if it is one computation and there is room for it, else every run apart."""
        return [batch] if len(batch) == 1 or self._takes(batch) else [[run] for run in batch]

    def _takes(self, batch: Batch) -> bool:
        first = batch[0]
        if [run.shapes for run in batch].count(first.shapes) == len(batch):
            needed = sum([_aligned(len(batch) * size) for size in first.nbytes])
            return len(batch) * first.shapes[0][0] <= self._most_rows and self._taken + needed <= self._bytes.nbytes
        alike = len({self._contract.alike(run.shapes) for run in batch}) == 1
        if not alike or sum(run.shapes[0][0] for run in batch) > self._most_rows:
            return False
        needed = sum(
            _aligned(nbytes(spec.dtype, _together(shapes)))
            for spec, shapes in zip(
                self._contract.inputs, zip(*(run.shapes for run in batch), strict=True), strict=True
            )
        )
        return self._taken + needed <= self._bytes.nbytes

    def put_together(self, parts: Sequence[Array]) -> Array:
        """A copy of them, one after the other along axis 0, the shorter padded with zeros; it stays until `clear`."""
        shape = _together([part.shape for part in parts])
        together = self._room(math.prod(shape) * parts[0].itemsize).view(parts[0].dtype).reshape(shape)
        if all(part.shape[1:] == shape[1:] for part in parts):
            return np.concatenate(parts, out=together)
        together[...] = 0
        start = 0
        for part in parts:
            own = (slice(start, start + len(part)), *map(slice, part.shape[1:]))
            together[own] = part
            start += len(part)
        return together

    def join(self, regions: Sequence[Bytes], dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        """The same of arrays of one shape, by their bytes; `shape` is that of all."""
        room = self._room(sum([region.nbytes for region in regions]))
        np.concatenate(regions, out=room)
        return room.view(dtype).reshape(shape)

    def _room(self, size: int) -> Bytes:
        room = self._bytes[self._taken : self._taken + size]
        self._taken += _aligned(size)
        return room


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of arrays one after the other along axis 0, along all others as large as the largest."""
    if len(set(shapes)) == 1:
        return (len(shapes) * shapes[0][0], *shapes[0][1:])
    return (sum(shape[0] for shape in shapes), *map(max, zip(*(shape[1:] for shape in shapes), strict=True)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class _Going:
    """A batch on its way through the segments: values that a later one reads, and outputs that stand in the slots.

    Runs that are `alike` have one shape and want one and the same; then what was `written` is known by output, else by
    run and output.

    One that `waits` while others run has its values copied out of the arena, which then holds one at a time: so it
    was planned, and seen to be enough. Values of several would leave holes in it that no plan foresees.
    """

    def __init__(self, batch: Batch, waits: bool) -> None:
        self.batch = batch
        first = batch[0]
        kinds = [(run.shapes, run.outputs, run.turn) for run in batch]
        self.alike = len(batch) > 1 and kinds.count((first.shapes, first.outputs, False)) == len(batch)
        self.slots = [run.slot for run in batch]
        self.wanted = frozenset(first.outputs if self.alike else [index for run in batch for index in run.outputs])
        self.waits = waits
        self.values: dict[str, Array] = {}
        self.written: dict[int | tuple[int, int], tuple[int, tuple[int, ...], int]] = {}
        self.error: tuple[Reason, str] | None = None

    def fail(self, error: Exception) -> None:
        """Have this for an answer, unless it has failed before. The exception is not kept: its frames hold values; the
        log has the traceback of one that nobody foresaw."""
        if self.error is not None:
            return
        self.values.clear()
        if isinstance(error, RefusedError):
            self.error = error.reason, str(error)
        elif isinstance(error, TightfitError):
            self.error = Reason.ENGINE_ERROR, str(error)
        else:
            log.get("engine").exception("run failed", ids=[run.id for run in self.batch])
            self.error = Reason.FAULT, f"the engine failed: {type(error).__name__}"

    def answers(self) -> list[Done | RunError]:
        """Of each run, once it has been through all segments."""
        if self.error is not None:
            return [RunError(run.id, self.error[0].value, self.error[1]) for run in self.batch]
        if self.alike:
            outputs = tuple([self.written[index] for index in self.batch[0].outputs])
            return [Done(run.id, outputs) for run in self.batch]
        return [Done(run.id, tuple([self.written[run.id, index] for index in run.outputs])) for run in self.batch]


def _source(folder: Path, finalised: Path | None, step: int, segment: Segment, options: SessionOptions) -> Source:
    if not options.residency.needs_finalise:
        return Source(safe_path(folder, segment.file), options)
    if finalised is None:
        raise AgentError(f"segment {segment.file} is {options.residency.value}, and no laid-out files were given")
    graph, weights = laid_out_files(finalised, step)
    return Source(graph, options, weights)


def _arena(plan: MemoryPlan) -> ArenaOptions:
    """The plan's arena, and as its cap all that the budget leaves beside what the runtime's allocator does not see.

    It counts copies of weights too, though it keeps them elsewhere, and most of them while one is made at loading.
    """
    run = plan.phase("run")
    arena = ("activations", "workspace")
    planned = sum(term.nbytes for term in run.terms if term.name in arena)
    elsewhere = sum(term.nbytes for term in run.terms if term.kind != "file" and term.name not in (*arena, "weights"))
    weights = plan.phase("load").term("weights")
    return ArenaOptions(planned, max(plan.budget_bytes - elsewhere, planned + (weights.nbytes if weights else 0)))


def _last_uses(segments: tuple[Segment, ...]) -> dict[str, int]:
    """Name of every segment input -> the last segment that reads it."""
    return {name: step for step, segment in enumerate(segments) for name in segment.inputs}
