"""The engine without its process: segments, slots and what a bad run answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper

from agent.backends.base import ArenaOptions, BackendError, SessionOptions, open_backend
from agent.engine.channel import Done, Layout, Run, RunError, Slab
from agent.engine.passes import Engine, _arena
from agent.errors import Reason
from agent.strings import pack_strings
from targets.arena import Arena
from targets.budget import MemoryPlan, Phase, Term
from targets.bundle import Residency, read_manifest
from targets.errors import BundleError
from targets.tensor import Contract, DimRange, DType
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
    _, (reply,) = engine.run([[run]])
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
    _, together = engine.run([[run] for run in runs])
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
    _, (first, second) = engine.run([[run_of(1)], [run_of(0, slot=1)]])
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
    passed, replies = engine.run([[Run(slot, slot, ((1,),), (8,), (0,))] for slot in range(4)])
    assert passed.pass_s > 0
    assert [reply.id for reply in replies] == [0, 1, 2, 3]
    assert [getattr(reply, "reason", None) for reply in replies] == ["output_too_large", None, "engine_error", None]
    assert [reply.outputs for reply in replies if isinstance(reply, Done)] == [((0, (4,), 16),), ((0, (16,), 64),)]
    _, failed = engine.run([[Run(slot, slot, ((1,),), (8,), (0,))] for slot in (0, 2)])
    assert [type(reply) for reply in failed] == [RunError, RunError]


# --- batches

PICKED, COMPANY, MOST = range(3)


def picking(slab: Slab, slot: int, at: list[int], *outputs: int) -> Run:
    """A run of the bundle of that name, put into the slot."""
    rows = len(at)
    put(slab, slot, np.full((rows, 8), slot, np.float32), np.array(at))
    return Run(100 + slot, slot, ((rows, 8), (rows,)), (rows * 32, rows * 8), outputs or (PICKED, COMPANY))


def seen(slab: Slab, run: Run) -> tuple[list[list[float]], list[int]]:
    """What the run picked, and with how many rows each of its own was computed."""
    rows = run.shapes[0][0]
    picked = slab.output(run.slot, PICKED)[: rows * 32].view(np.float32).reshape(rows, 8)
    return picked.tolist(), slab.output(run.slot, COMPANY)[: rows * 8].view(np.int64).tolist()


def expected(run: Run, at: list[int]) -> list[list[float]]:
    return [[8 * row + column + run.slot for column in range(8)] for row in at]


@pytest.fixture(scope="module")
def picker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Slab]:
    return engine_of(bundles.picking(tmp_path_factory.mktemp("batches") / "picking.tfb"))


def test_a_batch_is_computed_together_and_taken_apart(picker: tuple[Engine, Slab]) -> None:
    engine, slab = picker
    ats = [[3], [1, 2], [15, 0, 7], [4]]
    runs = [picking(slab, slot, at) for slot, at in enumerate(ats)]
    _, answers = engine.run([runs[:3], [runs[3]]])
    shapes = [((PICKED, (len(at), 8), 32 * len(at)), (COMPANY, (len(at),), 8 * len(at))) for at in ats]
    assert answers == [Done(run.id, outputs) for run, outputs in zip(runs, shapes, strict=True)]
    for run, at, company in zip(runs, ats, (6, 6, 6, 1), strict=True):
        assert seen(slab, run) == (expected(run, at), [company] * len(at))


def test_each_run_of_a_batch_gets_the_outputs_that_it_asked_for(picker: tuple[Engine, Slab]) -> None:
    engine, slab = picker
    runs = [picking(slab, 0, [1], COMPANY), picking(slab, 1, [2, 3], PICKED)]
    for slot, index in ((0, PICKED), (1, COMPANY)):
        slab.output(slot, index)[:] = 77
    _, answers = engine.run([runs])
    assert answers == [Done(100, ((COMPANY, (1,), 8),)), Done(101, ((PICKED, (2, 8), 64),))]
    assert (slab.output(0, PICKED) == 77).all()
    assert (slab.output(1, COMPANY) == 77).all()


@pytest.fixture(scope="module")
def padder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Slab]:
    return engine_of(bundles.masked(tmp_path_factory.mktemp("padded") / "masked.tfb"))


def masking(slab: Slab, slot: int, rows: int, length: int) -> Run:
    """A run of the bundle of that name; all of its mask is 1."""
    x = (np.arange(rows * length, dtype=np.float32) + 10 * slot + 1).reshape(rows, length)
    put(slab, slot, x, np.ones_like(x))
    return Run(200 + slot, slot, (x.shape,) * 2, (x.nbytes,) * 2, (0, 1, 2))


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [((3, 1, 4), (4, 4, 4)), ((5, 8), (8, 8)), ((3, 3), (3, 3)), ((7,), (7,)), ((3, 7), (3, 7))],
    ids=["to the longest", "of the larger bucket", "nothing to pad", "alone", "two buckets"],
)
def test_what_is_padded_answers_as_it_would_alone(
    padder: tuple[Engine, Slab], lengths: tuple[int, ...], computed: tuple[int, ...]
) -> None:
    engine, slab = padder
    # What stood there before must not pass for padding.
    engine.run([[masking(slab, slot, 2, 8) for slot in range(2)]])
    rows = [1, 2, 1][: len(lengths)]
    runs = [masking(slab, slot, count, size) for slot, (count, size) in enumerate(zip(rows, lengths, strict=True))]
    _, answers = engine.run([runs])
    for run, answer, count, size, length in zip(runs, answers, rows, lengths, computed, strict=True):
        shapes = (0, (count, size), 4 * count * size), (1, (count,), 4 * count), (2, (count,), 8 * count)
        assert answer == Done(run.id, shapes)
        x = slab.input(run.slot, 0)[: run.nbytes[0]].view(np.float32).reshape(count, size)
        after, total, longest = (
            slab.output(run.slot, index)[: shapes[index][2]].view(dtype)
            for index, dtype in enumerate((np.float32, np.float32, np.int64))
        )
        assert np.array_equal(after.reshape(count, size), x + 1)
        assert np.array_equal(total, x.sum(1))
        assert longest.tolist() == [length] * count


def test_what_is_no_batch_is_computed_apart(picker: tuple[Engine, Slab]) -> None:
    """More rows than a batch may have."""
    engine, slab = picker
    runs = [picking(slab, slot, [slot] * 3) for slot in range(3)]
    _, answers = engine.run([runs])
    assert all(isinstance(answer, Done) for answer in answers)
    assert [seen(slab, run) for run in runs] == [(expected(run, [run.slot] * 3), [3] * 3) for run in runs]


def test_without_a_batch_dimension_nothing_is_put_together(tmp_path: Path) -> None:
    engine, slab = engine_of(bundles.picking(tmp_path / "picking.tfb", batch=None))
    runs = [picking(slab, slot, [slot]) for slot in range(3)]
    engine.run([runs])
    assert [seen(slab, run)[1] for run in runs] == [[1]] * 3


def test_shapes_that_differ_are_not_put_together(tmp_path: Path) -> None:
    x, y = (bundles.dense(name, DType.FLOAT32, "n", "w", largest=64) for name in "xy")
    contract = Contract((x,), (y,), {"n": DimRange(1, 1, 8), "w": DimRange(1, 1, 8)}, "n")
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    engine, slab = engine_of(bundles.write_bundle(tmp_path / "b.tfb", [bundles.model_of(nodes, [x], [y])], contract))
    runs = []
    for slot, width in enumerate((3, 4)):
        put(slab, slot, np.full((1, width), slot, np.float32))
        runs.append(Run(slot, slot, ((1, width),), (4 * width,), (0,)))
    _, answers = engine.run([runs])
    assert answers == [Done(0, ((0, (1, 3), 12),)), Done(1, ((0, (1, 4), 16),))]


@pytest.mark.parametrize("streams", [False, True], ids=["one after the other", "segment by segment"])
def test_a_batch_that_is_not_put_together_needs_no_more_arena_than_one_run(tmp_path: Path, streams: bool) -> None:
    """Values of 1 MiB between two segments; the arena has room for a value and what is made of it, and no more."""
    mib, slots = 1 << 20, 6
    x, cut, y = (bundles.dense(name, DType.FLOAT32, mib // 4) for name in ("x", "cut", "y"))
    contract = Contract((x,), (y,), {})
    models = [
        bundles.model_of([helper.make_node("Neg", [start.name], [end.name])], [start], [end])
        for start, end in itertools.pairwise((x, cut, y))
    ]
    plan = bundles.plan_of(contract, slots, sizes=[0, 0], activations=2 * mib)
    plan = msgspec.structs.replace(plan, budget_bytes=plan.phase("run").total_bytes)
    engine, slab = engine_of(bundles.write_bundle(tmp_path / "b.tfb", models, contract, plan=plan))
    engine._streams = streams
    runs = [Run(slot, slot, ((mib // 4,),), (mib,), (0,)) for slot in range(slots)]
    for slot in range(slots):
        put(slab, slot, np.full(mib // 4, slot, np.float32))
    _, answers = engine.run([runs])
    assert answers == [Done(slot, ((0, (mib // 4,), mib),)) for slot in range(slots)]
    assert [slab.output(slot, 0).view(np.float32)[-1] for slot in range(slots)] == list(range(slots))


def test_runs_without_rows_are_a_batch_as_well(picker: tuple[Engine, Slab]) -> None:
    engine, slab = picker
    runs = [picking(slab, slot, []) for slot in range(2)]
    _, answers = engine.run([runs])
    assert answers == [Done(100 + slot, ((PICKED, (0, 8), 0), (COMPANY, (0,), 0))) for slot in range(2)]


def test_of_a_batch_that_fails_only_the_bad_runs_do(picker: tuple[Engine, Slab]) -> None:
    engine, slab = picker
    ats = [[3], [16], [5, 6]]
    runs = [picking(slab, slot, at) for slot, at in enumerate(ats)]
    other = picking(slab, 3, [1])
    _, answers = engine.run([runs, [other]])
    assert [answer.id for answer in answers] == [100, 101, 102, 103]
    assert [type(answer) for answer in answers] == [Done, RunError, Done, Done]
    for run, at in ((runs[0], ats[0]), (runs[2], ats[2]), (other, [1])):
        assert seen(slab, run) == (expected(run, at), [len(at)] * len(at))
    # The next batch is one again.
    runs = [picking(slab, slot, [slot]) for slot in range(3)]
    engine.run([runs])
    assert [seen(slab, run)[1] for run in runs] == [[3]] * 3


def test_an_output_that_is_not_rows_is_not_taken_apart(picker: tuple[Engine, Slab]) -> None:
    """Whatever the contract promises: each run then gets what it gets alone."""
    engine, slab = picker
    runs = [picking(slab, slot, [slot], MOST) for slot in range(2)]
    _, answers = engine.run([runs])
    assert answers == [Done(100 + slot, ((MOST, (1, 8), 32),)) for slot in range(2)]
    assert [slab.output(slot, MOST)[:4].view(np.float32)[0] for slot in range(2)] == [0, 1]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_batches_answer_what_each_run_answers_alone(picker: tuple[Engine, Slab], batches: list[list[int]]) -> None:
    engine, slab = picker
    slots = itertools.cycle(range(8))
    assume(sum(map(len, batches)) <= 8)
    made = [[picking(slab, next(slots), list(range(rows))) for rows in batch] for batch in batches]
    _, answers = engine.run(made)
    runs = [run for batch in made for run in batch]
    assert [answer.id for answer in answers] == [run.id for run in runs]
    for batch in made:
        together = sum(run.shapes[0][0] for run in batch)
        for run in batch:
            rows = run.shapes[0][0]
            assert seen(slab, run) == (expected(run, list(range(rows))), [together if together <= 8 else rows] * rows)


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
