"""Sizes of weights read from a graph, against graphs that the onnx library wrote."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from agent.errors import AgentError
from agent.external_data import external_bytes
from targets.bundle import Residency
from tests.support import bundles


def test_all_that_is_outside_of_the_file(tmp_path: Path) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [Residency.HEAP] * 2, layers=3)
    for name in ("00", "01"):
        path = bundle / "segments" / f"{name}.onnx"
        assert external_bytes(path) == path.with_suffix(".bin").stat().st_size


def test_subgraphs_and_constants_count(tmp_path: Path) -> None:
    inner = onnx.numpy_helper.from_array(np.zeros(512, np.float32), "inner")
    value = helper.make_tensor_value_info("v", TensorProto.FLOAT, [512])
    branches = {}
    for name in ("then_branch", "else_branch"):
        constant = helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.zeros(256), "c"))
        nodes = [constant, helper.make_node("Identity", ["inner"], ["v"])]
        branches[name] = helper.make_graph(nodes, name, [], [value], [inner])
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    graph = helper.make_graph([helper.make_node("If", ["c"], ["v"], **branches)], "g", [condition], [value])
    path = tmp_path / "if.onnx"
    onnx.save(
        helper.make_model(graph), str(path), save_as_external_data=True, location="if.bin", size_threshold=1024,
        convert_attribute=True,
    )  # fmt: skip
    sizes = []
    model = onnx.load(path, load_external_data=False)
    for tensor in onnx.external_data_helper._get_all_tensors(model):
        sizes += [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    assert sizes
    assert external_bytes(path) == sum(sizes)


def test_a_tensor_without_a_length_is_its_file(tmp_path: Path) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [Residency.HEAP])
    path = bundle / "segments" / "00.onnx"
    model = onnx.load(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    del entries[[entry.key for entry in entries].index("length")]
    onnx.save(model, str(path))
    assert external_bytes(path) == path.with_suffix(".bin").stat().st_size


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"none\.onnx cannot be read"):
        external_bytes(tmp_path / "none.onnx")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x3a\x05hello")
@example(b"\x80" * 20)
def test_anything_else_is_an_error_or_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    with contextlib.suppress(AgentError):
        assert external_bytes(path) >= 0


def test_nesting_without_end(tmp_path: Path) -> None:
    graph = b""
    for _ in range(2000):  # graph > node > attribute > graph ...
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            graph = tag + varint(len(graph)) + graph
    (tmp_path / "deep.onnx").write_bytes(b"\x3a" + varint(len(graph)) + graph)
    with pytest.raises(AgentError, match="is not an ONNX graph"):
        external_bytes(tmp_path / "deep.onnx")


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])
