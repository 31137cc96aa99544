"""`--dump-after`: the graph as a pass left it, and weights referred to instead of read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from compile.errors import OptionError
from compile.forms import NORMALIZE
from compile.options import Options
from compile.pipeline import compile_model
from targets.board import load_board
from tests.support.models import external, init, model, node, normal, save, value

BOARD = load_board("x86-64-dev")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    nodes = [
        node("Constant", [], ["two"], value_float=2.0),
        node("Add", ["two", "one"], ["three"]),
        node("Mul", ["x", "three"], ["a"]),
        node("MatMul", ["a", "w"], ["y"]),
    ]
    weights = [external("w", [64, 64], location="w.bin"), init("one", np.float32(1))]
    path = save(folder, model(nodes, [value("x", [2, 64])], [value("y", None)], weights))
    (folder / "w.bin").write_bytes(normal(64, 64).tobytes())
    return path


def operators(path: Path) -> list[str]:
    return [n.op_type for n in onnx.load(str(path), load_external_data=False).graph.node]


@pytest.mark.usefixtures("unobserved")
def test_each_run_of_the_pass_leaves_a_graph_that_runs(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundles" / "m.tfb"
    compile_model(source, BOARD, out, Options(dump_after="LiftConstants", dump_to=source.parent))
    places = [index + 1 for index, step in enumerate(NORMALIZE) if type(step).__name__ == "LiftConstants"]
    dumps = [source.parent / f"m.{place:02}-LiftConstants.onnx" for place in places]
    assert sorted(source.parent.glob("m.*.onnx")) == sorted(dumps)
    assert operators(dumps[0]) == ["Add", "Mul", "MatMul"]
    assert operators(dumps[-1]) == ["Mul", "MatMul"]
    x = normal(2, 64, seed=1)
    for path in dumps:
        assert path.stat().st_size < 2000
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"x": x})[0], 3 * x @ normal(64, 64), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unobserved")
def test_by_default_it_stands_beside_the_bundle(source: Path, tmp_path: Path) -> None:
    compile_model(source, BOARD, tmp_path / "bundles" / "m.tfb", Options(scheme="int4", dump_after="FoldConstants"))
    (dump,) = (tmp_path / "bundles").glob("*.onnx")
    assert dump.name.endswith("-FoldConstants.onnx")
    (tensor,) = (t for t in onnx.load(str(dump), load_external_data=False).graph.initializer if t.name == "w")
    assert {entry.key: entry.value for entry in tensor.external_data}["location"] == "w.bin"
    assert not tensor.raw_data


@pytest.mark.usefixtures("unobserved")
def test_it_does_not_show_in_the_bundle(source: Path, tmp_path: Path) -> None:
    plain = compile_model(source, BOARD, tmp_path / "a" / "m.tfb", Options())
    dumped = compile_model(source, BOARD, tmp_path / "b" / "m.tfb", Options(dump_after="SortNodes"))
    assert plain == dumped


def test_an_unknown_pass_lists_those_there_are(source: Path, tmp_path: Path) -> None:
    words = "--dump-after 'sortnodes' is no pass .*did you mean 'SortNodes'"
    with pytest.raises(OptionError, match=words):
        compile_model(source, BOARD, tmp_path / "m.tfb", Options(dump_after="sortnodes"))


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    options = Options(dump_after="SortNodes", dump_to=source / "inside")
    with pytest.raises(OptionError, match=r"cannot write .*SortNodes\.onnx: Not a directory"):
        compile_model(source, BOARD, tmp_path / "m.tfb", options)
    assert not (tmp_path / "m.tfb").exists()
