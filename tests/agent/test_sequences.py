"""Windows of a long request through a slot, without an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from onnx import helper

from agent.engine.channel import Layout, Slab
from agent.errors import Reason, RefusedError
from agent.models import open_model
from agent.request import Output, Result
from agent.sequences import LongRequest, is_long
from targets.errors import BudgetError
from targets.tensor import Contract, DimRange, DType, TensorSpec, human
from targets.windows import Join, Split
from tests.support.bundles import model_of, plan_of, write_bundle

SPLIT = Split("t", 8, 4, 100, (Join(1), Join()))
CONTRACT = Contract(
    (
        TensorSpec("x", DType.FLOAT32, (2, "t"), 2 * 8 * 4),
        TensorSpec("scale", DType.FLOAT32, (1,), 4),
        TensorSpec("mask", DType.INT64, ("t",), 8 * 8),
    ),
    (TensorSpec("y", DType.FLOAT32, (2, "t"), 2 * 8 * 4), TensorSpec("mean", DType.FLOAT32, (1,), 4)),
    {"t": DimRange(1, 8, 8)},
    split=SPLIT,
)
MASK = TensorSpec("y", DType.INT64, ("t",), 8 * 8)
SHAPES = ((2, 21), (1,), (21,))


@pytest.fixture
def slab() -> Slab:
    slab = Slab.create(Layout.of(CONTRACT, 2))
    slab.close_fd()
    return slab


def put(slab: Slab, index: int, value: np.ndarray) -> Output:
    slab.output(1, index)[: value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
    return Output(index, value.shape, value.nbytes)


def test_only_what_is_longer_than_a_window_is_split() -> None:
    assert not is_long(CONTRACT, ((2, 8), (1,), (8,)))
    assert is_long(CONTRACT, ((2, 9), (1,), (9,)))


def test_windows_run_as_the_whole_would(slab: Slab) -> None:
    x = np.arange(42, dtype=np.float32).reshape(2, 21)
    mask = np.arange(21) % 2
    scale = np.array([3], np.float32)
    request = LongRequest(CONTRACT, SHAPES, [x.tobytes(), scale.tobytes(), memoryview(mask.tobytes())], [1, 0])
    for window in request.windows:
        shapes, nbytes = request.fill(window, slab, 1)
        size = window.stop - window.start
        assert (shapes, nbytes) == (((2, size), (1,), (size,)), (8 * size, 4, 8 * size))
        seen = slab.input(1, 0)[: nbytes[0]].view(np.float32).reshape(shapes[0])
        factor = slab.input(1, 1)[:4].view(np.float32)
        of = slab.input(1, 2)[: nbytes[2]].view(np.int64)
        outputs = put(slab, 1, np.full(1, 7, np.float32)), put(slab, 0, (seen * factor * of).astype(np.float32))
        request.take(window, Result(outputs), slab, 1)
    mean, y = request.answer()
    assert np.array_equal(y, x * 3 * mask)
    assert mean.tolist() == [7.0]


def test_an_engine_that_gives_too_little(slab: Slab) -> None:
    request = LongRequest(CONTRACT, SHAPES, [bytes(168), bytes(4), bytes(168)], [0])
    outputs = (put(slab, 0, np.zeros((2, 3), np.float32)),)
    with pytest.raises(RefusedError, match="output 'y': a window made 3 positions on axis 1, 6 are needed") as caught:
        request.take(request.windows[0], Result(outputs), slab, 1)
    assert caught.value.reason is Reason.ENGINE_ERROR


def test_a_plan_that_does_not_count_long_requests_is_refused(tmp_path: Path) -> None:
    """Bodies and answers of the longest, not of a window."""
    model = model_of([helper.make_node("Identity", ["mask"], ["y"])], [CONTRACT.inputs[2]], [MASK])
    contract = Contract(CONTRACT.inputs[2:], (MASK,), CONTRACT.dims, split=replace(SPLIT, joins=(Join(0),)))
    assert open_model(write_bundle(tmp_path / "whole.tfb", [model], contract), 3400 << 20)
    needed = {"bodies": 2 * 2 * 100 * 8, "answers": 2 * 100 * 8}
    for term, what in (("bodies", "bodies of requests"), ("answers", "answers that are put together of windows")):
        plan = plan_of(contract, **{term: needed[term] - 1})
        bundle = write_bundle(tmp_path / f"{term}.tfb", [model], contract, plan=plan)
        with pytest.raises(BudgetError, match=f"for {what}, which need {human(needed[term])}"):
            open_model(bundle, 3400 << 20)
