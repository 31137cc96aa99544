"""The engine without its process: segments, slots and what a bad run answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.backends.base import ArenaOptions, BackendError, SessionOptions, open_backend
from agent.engine.channel import Done, Layout, Run, RunError, Slab
from agent.engine.worker import Engine, _arena, warm_up
from agent.errors import AgentError, Reason
from agent.strings import pack_strings
from targets.arena import Arena
from targets.budget import MemoryPlan, Phase, Term
from targets.bundle import Residency, SampleTensor, read_manifest
from targets.errors import BundleError
from targets.tensor import DType
from tests.support import bundles


def engine_of(folder: Path) -> tuple[Engine, Slab]:
    manifest = read_manifest(folder)
    slab = Slab.create(Layout.of(manifest.contract, manifest.plan.slots))
    slab.close_fd()
    return Engine(folder, manifest, 1, slab), slab


@pytest.fixture(scope="module")
def add(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Slab]:
    return engine_of(bundles.add(tmp_path_factory.mktemp("worker") / "add.tfb"))


def put(slab: Slab, slot: int, *values: np.ndarray) -> None:
    for index, value in enumerate(values):
        slab.input(slot, index)[: value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)


def answer(engine: Engine, run: Run) -> Done | RunError:
    _, (reply,) = engine.run([run])
    return reply


def done(engine: Engine, run: Run) -> Done:
    reply = answer(engine, run)
    assert isinstance(reply, Done), reply
    return reply


def run_of(*outputs: int, slot: int = 0, batch: int = 1) -> Run:
    return Run(1, slot, ((batch, 8),) * 2, (batch * 32,) * 2, outputs)


def test_segments_pass_values_on_by_name(add: tuple[Engine, Slab]) -> None:
    engine, slab = add
    a, b = np.ones((2, 8), np.float32), np.full((2, 8), 2, np.float32)
    put(slab, 1, a, b)
    assert done(engine, run_of(1, 0, slot=1, batch=2)).outputs == ((1, (2, 8), 64), (0, (2, 8), 64))
    total, scaled = (slab.output(1, index)[:64].view(np.float32).reshape(2, 8) for index in (0, 1))
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(scaled, (a + b) * np.arange(8, dtype=np.float32))


@pytest.mark.parametrize("output", [0, 1])
def test_only_what_is_asked_for_is_written(add: tuple[Engine, Slab], output: int) -> None:
    engine, slab = add
    put(slab, 0, np.ones((1, 8), np.float32), np.ones((1, 8), np.float32))
    slab.output(0, 1 - output)[:] = 77
    assert done(engine, run_of(output)).outputs == ((output, (1, 8), 32),)
    assert (slab.output(0, 1 - output) == 77).all()


def test_strings_cross_the_slab(tmp_path: Path) -> None:
    engine, slab = engine_of(bundles.identity(tmp_path / "text.tfb", DType.STRING, (2, 1)))
    packed = pack_strings(["é".encode(), b""])
    slab.input(0, 0)[: len(packed)] = np.frombuffer(packed, np.uint8)
    assert done(engine, Run(1, 0, ((2, 1),), (len(packed),), (0,))).outputs == ((0, (2, 1), len(packed)),)
    assert slab.output(0, 0)[: len(packed)].tobytes() == packed


def test_a_failed_run_is_answered_and_the_next_one_runs(tmp_path: Path) -> None:
    engine, slab = engine_of(bundles.growing(tmp_path / "growing.tfb"))
    run = Run(5, 0, ((1,),), (8,), (0,))
    for value, reason in ((17, Reason.OUTPUT_TOO_LARGE), (-1, Reason.ENGINE_ERROR)):
        put(slab, 0, np.array([value]))
        reply = answer(engine, run)
        assert isinstance(reply, RunError)
        assert (reply.id, reply.reason) == (5, reason.value)
        assert "\n" not in reply.message
    put(slab, 0, np.array([16]))
    assert isinstance(answer(engine, run), Done)


def test_runs_of_one_pass_answer_what_each_answers_alone(tmp_path: Path) -> None:
    """To the bit, for batches of different sizes, which are not merged."""
    engine, slab = engine_of(bundles.chain(tmp_path / "chain.tfb", [Residency.HEAP] * 3, slots=4))
    rng = np.random.default_rng(0)
    runs, alone = [], []
    for slot, rows in enumerate((3, 1, 4, 2)):
        put(slab, slot, rng.standard_normal((rows, 256), np.float32))
        runs.append(Run(10 + slot, slot, ((rows, 256),), (rows * 1024,), (0,)))
        alone.append((done(engine, runs[-1]), slab.output(slot, 0).tobytes()))
        slab.output(slot, 0)[:] = 0
    _, together = engine.run(runs)
    assert [
        (reply, slab.output(slot, 0)[: run.nbytes[0]].tobytes())
        for slot, (reply, run) in enumerate(zip(together, runs, strict=True))
    ] == [(reply, data[: run.nbytes[0]]) for (reply, data), run in zip(alone, runs, strict=True)]


def test_each_run_of_a_pass_gets_the_outputs_that_it_asked_for(add: tuple[Engine, Slab]) -> None:
    engine, slab = add
    for slot in (0, 1):
        put(slab, slot, np.full((1, 8), slot, np.float32), np.ones((1, 8), np.float32))
        for index in (0, 1):
            slab.output(slot, index)[:] = 77
    _, (first, second) = engine.run([run_of(1), run_of(0, slot=1)])
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert (first.outputs, second.outputs) == (((1, (1, 8), 32),), ((0, (1, 8), 32),))
    assert slab.output(0, 1)[:32].view(np.float32).tolist() == list(range(8))
    assert slab.output(1, 0)[:32].view(np.float32).tolist() == [2.0] * 8
    assert (slab.output(0, 0) == 77).all()
    assert (slab.output(1, 1) == 77).all()


def test_a_run_that_fails_fails_alone(tmp_path: Path) -> None:
    engine, slab = engine_of(bundles.growing(tmp_path / "growing.tfb", slots=4))
    for slot, value in enumerate((17, 4, -1, 16)):
        put(slab, slot, np.array([value]))
    passed, replies = engine.run([Run(slot, slot, ((1,),), (8,), (0,)) for slot in range(4)])
    assert passed.pass_s > 0
    assert [reply.id for reply in replies] == [0, 1, 2, 3]
    assert [getattr(reply, "reason", None) for reply in replies] == ["output_too_large", None, "engine_error", None]
    assert [reply.outputs for reply in replies if isinstance(reply, Done)] == [((0, (4,), 16),), ((0, (16,), 64),)]
    _, failed = engine.run([Run(slot, slot, ((1,),), (8,), (0,)) for slot in (0, 2)])
    assert [type(reply) for reply in failed] == [RunError, RunError]


def test_the_arena_is_what_the_runtimes_allocator_sees() -> None:
    """It counts copies of weights against its cap, and nothing of what stands elsewhere."""
    names = ("runtime", "service", "session", "arena_index", "bodies", "recipe", "scratch", "waiting")
    sizes = {name: 1 << at for at, name in enumerate(names)}
    sizes |= {"activations": 100, "workspace": 5, "weights": 1000}
    terms = tuple(Term(name, "anonymous", nbytes) for name, nbytes in sizes.items())
    run = Phase("run", (*terms, Term("io_slots", "shared", 256), Term("mapped_weights", "file", 5000)))
    load = Phase("load", (Term("runtime", "anonymous", 1), Term("weights", "anonymous", 1500)))
    plan = MemoryPlan(10_000, 2, (load, run), Arena(100, 100, 1, ()))
    assert _arena(plan) == ArenaOptions(105, 10_000 - 511)
    # However tight: at loading there are more copies for a moment.
    assert _arena(msgspec.structs.replace(plan, budget_bytes=1500)) == ArenaOptions(105, 1605)


def test_a_sample_that_does_not_run_is_said(tmp_path: Path) -> None:
    folder = bundles.growing(tmp_path / "growing.tfb")
    (folder / "sample").mkdir()
    (folder / "sample" / "0.bin").write_bytes(np.array([17]).tobytes())
    bundles.rewrite(folder, read_manifest(folder), sample=(SampleTensor("n", (1,), "sample/0.bin"),))
    engine, slab = engine_of(folder)
    with pytest.raises(AgentError, match="the bundle's own sample does not run: output 'y' has 68 B"):
        warm_up(engine, folder, read_manifest(folder), slab)


def test_the_sample_must_fit_its_shape(tmp_path: Path) -> None:
    folder = bundles.add(tmp_path / "add.tfb")
    engine, slab = engine_of(folder)
    warm_up(engine, folder, read_manifest(folder), slab)
    (folder / "sample" / "1.bin").write_bytes(bytes(36))
    with pytest.raises(BundleError, match="does not run: that of input 'b' has 36 B, which does not fit its shape"):
        warm_up(engine, folder, read_manifest(folder), slab)


def test_segments_load_with_and_without_prepacking(tmp_path: Path) -> None:
    folder = bundles.add(tmp_path / "add.tfb")
    engine_of(folder)  # registers the arena that sessions share
    backend = open_backend("onnxruntime")
    assert backend.describe().startswith("onnxruntime 1.")
    for settings in ({}, {"session.disable_prepacking": "1"}):
        session = backend.load_session(folder / "segments" / "00.onnx", SessionOptions(1, settings))
        feeds = {name: np.ones((1, 8), np.float32) for name in "ab"}
        (total,) = session.run(feeds, ["total"])
        assert total.tolist() == [[2.0] * 8]
        with pytest.raises(BackendError, match="onnxruntime: "):
            session.run({**feeds, "a": np.ones((1, 7), np.float32)}, ["total"])


def test_runtimes_there_are_not() -> None:
    with pytest.raises(BundleError, match="no TensorRT backend"):
        open_backend("tensorrt")
