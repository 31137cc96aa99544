"""Sequences stay sequences: shape inference would type them as tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compile.passes.sequences import sequences
from tests.support.models import emit, init, model, node, normal, prepared, run, save, value


def save_sequence_model(folder: Path, opset: int) -> Path:
    nodes = [
        node("SequenceConstruct", ["x", "w"], ["s"]),
        node("SequenceInsert", ["s", "x"], ["same"]),
        node("SequenceAt", ["same", "one"], ["y"]),
    ]
    weights = [init("w", normal(2, 3)), init("one", np.array(1))]
    return save(folder, model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], weights, opset=opset))


def test_a_model_with_sequences_inside_runs_at_old_and_new_opsets(tmp_path: Path) -> None:
    for opset in (11, 12, 13, 18):
        folder = tmp_path / str(opset)
        path = save_sequence_model(folder, opset)
        x = normal(2, 3, seed=5)
        segment, _ = emit(path, "fp32", folder)
        np.testing.assert_array_equal(run(segment, {"x": x})["y"], run(path, {"x": x})["y"])


def test_no_sequence_is_typed_as_a_tensor(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        model(
            [node("SplitToSequence", ["x"], ["s"], axis=0), node("ConcatFromSequence", ["s"], ["y"], axis=1)],
            [value("x", ["n", 3])],
            [value("y", [None, None])],
        ),
    )
    graph = prepared(path, "x=1..4,3")
    found = sequences(graph)
    assert {v.name for v in found} == {"s"}
    assert all(v.type is None and v.shape is None for v in found)
