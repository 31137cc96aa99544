"""The engine without its process: segments, slots and what a bad run answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent.backends.base import BackendError, SessionOptions, open_backend
from agent.engine.channel import Done, Layout, Run, RunError, Slab
from agent.engine.worker import Engine, answer, warm_up
from agent.errors import Reason
from agent.strings import pack_strings
from targets.bundle import read_manifest
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


def run_of(*outputs: int, slot: int = 0, batch: int = 1) -> Run:
    return Run(1, slot, ((batch, 8),) * 2, (batch * 32,) * 2, outputs)


def test_segments_pass_values_on_by_name(add: tuple[Engine, Slab]) -> None:
    engine, slab = add
    a, b = np.ones((2, 8), np.float32), np.full((2, 8), 2, np.float32)
    put(slab, 1, a, b)
    done = engine.run(run_of(1, 0, slot=1, batch=2))
    assert done.outputs == ((1, (2, 8), 64), (0, (2, 8), 64))
    total, scaled = (slab.output(1, index)[:64].view(np.float32).reshape(2, 8) for index in (0, 1))
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(scaled, (a + b) * np.arange(8, dtype=np.float32))


@pytest.mark.parametrize("output", [0, 1])
def test_only_what_is_asked_for_is_written(add: tuple[Engine, Slab], output: int) -> None:
    engine, slab = add
    put(slab, 0, np.ones((1, 8), np.float32), np.ones((1, 8), np.float32))
    slab.output(0, 1 - output)[:] = 77
    assert engine.run(run_of(output)).outputs == ((output, (1, 8), 32),)
    assert (slab.output(0, 1 - output) == 77).all()


def test_strings_cross_the_slab(tmp_path: Path) -> None:
    engine, slab = engine_of(bundles.identity(tmp_path / "text.tfb", DType.STRING, (2, 1)))
    packed = pack_strings(["é".encode(), b""])
    slab.input(0, 0)[: len(packed)] = np.frombuffer(packed, np.uint8)
    done = engine.run(Run(1, 0, ((2, 1),), (len(packed),), (0,)))
    assert done.outputs == ((0, (2, 1), len(packed)),)
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


def test_the_sample_must_fit_its_shape(tmp_path: Path) -> None:
    folder = bundles.add(tmp_path / "add.tfb")
    engine, slab = engine_of(folder)
    warm_up(engine, folder, read_manifest(folder), slab)
    (folder / "sample" / "1.bin").write_bytes(bytes(36))
    with pytest.raises(BundleError, match="the sample of input 'b' has 36 B, which does not fit its shape"):
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
