"""The engine process: loads a runtime and a bundle, then runs what the gateway puts into the slab.

Started as `python -m agent.engine.worker CONTROL_FD SLAB_FD PARENT_PID`, a fresh interpreter. It lives exactly as
long as its gateway: the kernel kills it with its parent, and the end of the control socket ends its loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from agent import log
from agent.backends.base import ArenaOptions, Array, BackendError, Session, SessionOptions, open_backend
from agent.engine.channel import (
    Done,
    Failed,
    Layout,
    Load,
    Pass,
    Passed,
    Ready,
    Run,
    RunError,
    Slab,
    receive_in_engine,
    send,
)
from agent.engine.residency import Sessions, Source, give_freed_blocks_back, trim_heap
from agent.errors import AgentError, Reason, RefusedError
from agent.laid_out import check_runtime, laid_out_files
from agent.memory import pss_by_kind
from agent.strings import pack_strings, unpack_strings
from targets.budget import MemoryPlan
from targets.bundle import Manifest, Residency, Segment, read_manifest, safe_path
from targets.errors import BundleError, TightfitError
from targets.tensor import DType, TensorSpec, human

_PR_SET_PDEATHSIG = 1
# When memory runs out the kernel takes the engine, whose connections survive in the gateway, not the gateway.
_OOM_SCORE_ADJ = 500


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
        arena = _arena(manifest.plan)
        backend.prepare(arena)
        self.runtime = backend.describe()
        self.warm_s = 0.0
        """Seconds of the pass over the bundle's sample, once that was made."""
        if finalised:
            check_runtime(finalised, self.runtime)
        residencies = residencies or [segment.residency for segment in self._segments]
        sources = [
            _source(folder, finalised, step, segment, SessionOptions(threads, segment.settings, residency))
            for step, (segment, residency) in enumerate(zip(self._segments, residencies, strict=True))
        ]
        self._sessions = Sessions(backend, sources)
        self._last_use = _last_uses(self._segments)
        self._counted_bytes = 0
        # Loading leaves behind what optimizing the graphs took.
        trim_heap()

    def close(self) -> None:
        """Close every session."""
        self._sessions.close()

    def run(self, runs: Sequence[Run]) -> tuple[Passed, list[Done | RunError]]:
        """One pass: run what stands in the slots and leave the outputs there. Answers are in the order of `runs`.

        Segment by segment for all of them, so that what is streamed is brought in once. A run that fails fails alone:
        that is its answer, and the others go on. They all end in the last segment, so answers come together.
        """
        started = time.perf_counter()
        names = [spec.name for spec in self._contract.outputs]
        together = [_Running(run, {names[index]: index for index in run.outputs}, len(runs) > 1) for run in runs]
        for running in together:
            with running.failing_alone():
                for index, spec in enumerate(self._contract.inputs):
                    value = running.values[spec.name] = self._read_input(spec, index, running.run)
                    self._write_wanted(spec.name, value, running)
        for step in range(len(self._segments)):
            self._take_turn(step, [running for running in together if running.error is None])
        passed = Passed(time.perf_counter() - started, self._newly_streamed())
        return passed, [running.answer() for running in together]

    def _newly_streamed(self) -> int:
        """Bytes brought in since the last call."""
        before, self._counted_bytes = self._counted_bytes, self._sessions.streamed_bytes
        return self._counted_bytes - before

    def _take_turn(self, step: int, together: Sequence[_Running]) -> None:
        needing = [running for running in together if self._needed(step, running)]
        if needing:
            try:
                with self._sessions.turn(step) as session:
                    for running in needing:
                        with running.failing_alone():
                            self._run_segment(step, session, running)
                    if all(running.error for running in needing):
                        # The turn must not pass for one that shows what a run reads.
                        raise BackendError("every run of this pass failed")
            except Exception as error:  # noqa: BLE001 - the pages may not have come; see `failing_alone`
                for running in needing:
                    running.fail(error)
        for running in together:
            self._forget(step, running)

    def _needed(self, step: int, running: _Running) -> list[str]:
        """Of the segment's outputs, those that somebody reads."""
        return [o for o in self._segments[step].outputs if o in running.wanted or self._last_use.get(o, -1) > step]

    def _run_segment(self, step: int, session: Session, running: _Running) -> None:
        outputs = self._needed(step, running)
        values = session.run({name: running.values[name] for name in self._segments[step].inputs}, outputs)
        self._forget(step, running)
        for name, value in zip(outputs, values, strict=True):
            self._write_wanted(name, value, running)
            if self._last_use.get(name, -1) > step:
                running.values[name] = value.copy() if running.waits else value

    def _write_wanted(self, name: str, value: Array, running: _Running) -> None:
        """Write it into the slot if it was asked for: at once, so that outputs never wait beside what others make."""
        index = running.wanted.get(name)
        if index is not None:
            running.written[index] = self._write_output(index, running.run.slot, value)

    def _forget(self, step: int, running: _Running) -> None:
        """Let go of what no later segment reads."""
        for name in self._segments[step].inputs:
            if self._last_use[name] == step:
                running.values.pop(name, None)

    def _read_input(self, spec: TensorSpec, index: int, run: Run) -> Array:
        region = self._slab.input(run.slot, index)[: run.nbytes[index]]
        shape = run.shapes[index]
        if spec.dtype is DType.STRING:
            items = unpack_strings(region.data, int(np.prod(shape, dtype=np.int64)))
            return np.array([item.decode("utf-8") for item in items], dtype=object).reshape(shape)
        return region.view(np.dtype(spec.dtype.numpy)).reshape(shape)

    def _write_output(self, index: int, slot: int, value: Array) -> tuple[int, tuple[int, ...], int]:
        spec = self._contract.outputs[index]
        value = np.asarray(value)
        if value.dtype != np.dtype(spec.dtype.numpy):
            raise BackendError(f"output {spec.name!r} came as {value.dtype}, the bundle promises {spec.dtype.value}")
        if spec.dtype is DType.STRING:
            packed = pack_strings(str(item).encode("utf-8") for item in value.ravel())
            data = np.frombuffer(packed, np.uint8)
        else:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        region = self._slab.output(slot, index)
        if data.nbytes > region.nbytes:
            raise RefusedError(
                Reason.OUTPUT_TOO_LARGE,
                f"output {spec.name!r} has {human(data.nbytes)}, the bundle's plan has room for {human(region.nbytes)}",
            )
        region[: data.nbytes] = data
        return index, value.shape, data.nbytes


class _Running:
    """A run on its way through the segments: values that a later one reads, and outputs that stand in the slot.

    One that `waits` while others run has its values copied out of the arena, which then holds one run at a time: so it
    was planned, and seen to be enough. Values of several would leave holes in it that no plan foresees.
    """

    def __init__(self, run: Run, wanted: dict[str, int], waits: bool) -> None:
        self.run = run
        self.wanted = wanted
        self.waits = waits
        self.values: dict[str, Array] = {}
        self.written: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self.error: RunError | None = None

    @contextlib.contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Whatever goes wrong in the block is this run's answer."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one bad run must not end the engine; the log has the traceback
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with that answer, unless it has failed before. The exception is not kept: its frames hold values."""
        if self.error is not None:
            return
        self.values.clear()
        if isinstance(error, RefusedError):
            self.error = RunError(self.run.id, error.reason.value, str(error))
        elif isinstance(error, TightfitError):
            self.error = RunError(self.run.id, Reason.ENGINE_ERROR.value, str(error))
        else:
            log.get("engine").exception("run failed", id=self.run.id)
            self.error = RunError(self.run.id, Reason.FAULT.value, f"the engine failed: {type(error).__name__}")

    def answer(self) -> Done | RunError:
        """Once it has been through all segments."""
        return self.error or Done(self.run.id, tuple(self.written[index] for index in self.run.outputs))


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


def load(message: Load, slab_fd: int) -> Engine:
    """Load and warm the bundle. Raises TightfitError."""
    folder = Path(message.folder)
    manifest = read_manifest(folder)
    if manifest.digest != message.digest:
        raise BundleError("the bundle changed after it was verified", "start the agent again")
    slab = Slab(slab_fd, Layout.of(manifest.contract, manifest.plan.slots))
    residencies = [Residency(value) for value in message.residencies]
    finalised = Path(message.finalised) if message.finalised else None
    engine = Engine(folder, manifest, message.threads, slab, residencies, finalised)
    if manifest.sample or not manifest.contract.inputs:
        started = time.perf_counter()
        warm_up(engine, folder, manifest, slab)
        engine.warm_s = time.perf_counter() - started
    return engine


def warm_up(engine: Engine, folder: Path, manifest: Manifest, slab: Slab) -> None:
    """Run the bundle's sample once, so that the first request pays for nothing."""
    samples = {sample.name: sample for sample in manifest.sample}
    shapes, nbytes = [], []
    manifest.contract.check_inputs({s.name: (manifest.contract.input(s.name).dtype, s.shape) for s in manifest.sample})
    for index, spec in enumerate(manifest.contract.inputs):
        path = safe_path(folder, samples[spec.name].file)
        size = path.stat().st_size
        region = slab.input(0, index)
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
    everything = tuple(range(len(manifest.contract.outputs)))
    _, (reply,) = engine.run([Run(0, 0, tuple(shapes), tuple(nbytes), everything)])
    if isinstance(reply, RunError):
        raise AgentError(f"the bundle's own sample does not run: {reply.message}")


def _dense_nbytes(spec: TensorSpec, shape: tuple[int, ...]) -> int | None:
    if spec.dtype is DType.STRING:
        return None
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(spec.dtype.numpy).itemsize


def serve(control: socket.socket, engine: Engine) -> None:
    """Answer every run of every Pass with exactly one Done or RunError until the gateway is gone."""
    while (message := receive_in_engine(control)) is not None:
        if not isinstance(message, Pass):
            raise AgentError("the gateway sent a second Load")
        passed, answers = engine.run(message.runs)
        for each in (passed, *answers):
            send(control, each)


def tie_to_parent(parent: int) -> None:
    """Die when the gateway dies, and leave signals meant for the service to the gateway, which drains first."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the gateway is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(max(int(score.read_text(encoding="ascii")), _OOM_SCORE_ADJ)), encoding="ascii")
    except OSError as error:
        log.get("engine").warning("cannot raise oom_score_adj", error=error.strerror)


def main(arguments: list[str]) -> None:
    control_fd, slab_fd, parent = map(int, arguments)
    tie_to_parent(parent)
    control = socket.socket(fileno=control_fd)
    message = receive_in_engine(control)
    if not isinstance(message, Load):
        return
    log.configure(message.log_level, message.log_format)
    give_freed_blocks_back()
    started = time.perf_counter()
    try:
        engine = load(message, slab_fd)
    except TightfitError as error:
        send(control, Failed(error.message, error.hint))
        return
    pss = pss_by_kind(os.getpid())
    log.get("engine").debug("loaded", runtime=engine.runtime, **{f"pss_{kind}": n for kind, n in pss.items()})
    send(control, Ready(engine.runtime, time.perf_counter() - started, engine.warm_s, pss))
    serve(control, engine)


if __name__ == "__main__":
    main(sys.argv[1:])
