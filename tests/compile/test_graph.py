"""Reading ONNX files: every prefix and kind of damage is a named error, and weights are counted once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compile.errors import ModelError
from compile.graph import constant, contract_dtype, external_files, load_model, nodes_of, weight_nbytes
from tests.support.models import external, init, mlp, model, node, normal, save, value


def test_every_prefix_of_a_file_is_refused_or_complete(tmp_path: Path) -> None:
    whole = mlp(tmp_path, k=2, n=3).read_bytes()
    cut = tmp_path / "cut.onnx"
    refused = 0
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        try:
            load_model(cut)
        except ModelError:
            refused += 1
    # The last field of the file is the opset import; nothing shorter is a model.
    assert refused == len(whole)


@settings(max_examples=300)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_never_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    data = bytearray(mlp(folder, k=2, n=3).read_bytes())
    data[position % len(data)] = byte
    (folder / "model.onnx").write_bytes(data)
    try:
        graph = load_model(folder / "model.onnx")
    except ModelError:
        return
    assert weight_nbytes(graph) >= 0


def test_weights_are_counted_once_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(normal(10).tobytes() * 2)
    branch = helper.make_graph(
        [node("Add", ["x", "inner"], ["t"])], "then", [], [value("t", [10])], [init("inner", normal(10))]
    )
    other = helper.make_graph([node("Add", ["x", "w"], ["e"])], "else", [], [value("e", [10])])
    nodes = [
        node("Constant", [], ["k"], value=init("", normal(10))),
        node("Add", ["k", "again"], ["unused"]),
        node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
    ]
    weights = [
        external("w", [10], location="w.bin", offset=40, length=40),
        external("again", [10], location="w.bin", offset=40, length=40),
    ]
    inputs = [value("x", [10]), value("c", [], TensorProto.BOOL)]
    graph = load_model(save(tmp_path, model(nodes, inputs, [value("y", [10])], weights)))
    assert weight_nbytes(graph) == 3 * 40
    assert external_files(graph) == {"w.bin": tmp_path / "w.bin"}
    assert len(list(nodes_of(graph))) == 5


def test_external_weights_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 4096 + normal(10).tobytes())
    weights = [external("w", [10], location="w.bin", offset=4096)]
    save(tmp_path, model([node("Add", ["x", "w"], ["y"])], [value("x", [10])], [value("y", [10])], weights))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tensor = load_model(Path("../model.onnx")).graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), normal(10))


def test_only_what_nobody_can_override_is_constant(tmp_path: Path) -> None:
    inputs = [value("x", [4]), value("w", [4])]
    nodes = [node("Add", ["x", "w"], ["a"]), node("Add", ["a", "v"], ["y"])]
    proto = model(nodes, inputs, [value("y", [4])], [init("w", normal(4)), init("v", normal(4))])
    graph = load_model(save(tmp_path, proto))
    assert constant(None) is None
    assert constant(graph.graph.initializers["w"]) is None
    assert constant(graph.graph.initializers["v"]) is not None


def test_inputs_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [None])
    proto = model([node("SequenceLength", ["s"], ["y"])], [sequence], [value("y", [], TensorProto.INT64)])
    graph = load_model(save(tmp_path, proto))
    with pytest.raises(ModelError, match="'s' is Sequence"):
        contract_dtype(graph.graph.inputs[0])
