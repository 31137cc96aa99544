"""Products by panels of columns: the same results, and no byte of a weight twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.backends import ort
from compile.forms import NORMALIZE
from compile.graph import ir, load_model
from compile.passes.base import run_passes
from compile.passes.normalize import FixNames, RemoveDeadCode, SortNodes
from compile.passes.split.columns import COLUMNS, SplitColumns, matrix_of, panel, panels, turned_whole
from compile.quantize.schemes import SCHEMES
from compile.writer import BundleWriter
from tests.support.models import Array, external, init, model, node, normal, run, save, value


def split(path: Path, parts: int, folder: Path) -> tuple[ir.Model, Path]:
    """The graph after the product that gives `y` was split, and where it was written."""
    graph = load_model(path)
    run_passes(graph, [*NORMALIZE, SplitColumns("y", parts)])
    with BundleWriter(folder / "m.tfb", {}) as writer:
        with writer.weights("segments/weights.bin") as sink:
            writer.add_graph("segments/00.onnx", graph, sink, lambda _: None)
        (writer.folder / "segments").rename(folder / "split")
    return graph, folder / "split" / "00.onnx"


def beside(folder: Path, name: str, array: Array) -> onnx.TensorProto:
    """The tensor in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.bin").write_bytes(array.tobytes())
    element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return external(name, array.shape, element, location=f"{name}.bin", offset=0, length=array.nbytes)


@given(columns=st.integers(2, 3000), parts=st.integers(2, 64))
def test_panels_cover_every_column_once(columns: int, parts: int) -> None:
    found = panels(columns, parts)
    assert [at for start, stop in found for at in range(start, stop)] == list(range(columns))
    assert len(found) == min(parts, columns)
    if columns >= COLUMNS * parts:
        assert all(start % COLUMNS == 0 for start, _ in found)
        assert max(stop - start for start, stop in found) <= columns / parts + COLUMNS


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transB", "turned", "half", "half turned"])
@pytest.mark.parametrize("stored", ["in the model", "beside it"])
@settings(max_examples=5)
@given(
    k=st.integers(1, 40), n=st.integers(70, 700), parts=st.integers(2, 9), bias=st.sampled_from(["", "n", "1", "mn"])
)
def test_the_result_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, op: str, stored: str, k: int, n: int, parts: int, bias: str
) -> None:
    folder = tmp_path_factory.mktemp("columns")
    rows = "transB" in op or "turned" in op
    weight = normal(*((n, k) if rows else (k, n))).astype(np.float16 if "half" in op else np.float32)
    weights = [beside(folder, "w", weight) if stored == "beside it" else init("w", weight)]
    nodes, right = [], "w"
    if "half" in op:
        nodes.append(node("Cast", [right], ["wide"], to=1))
        right = "wide"
    if "turned" in op:
        nodes.append(node("Transpose", [right], ["t"], perm=[1, 0]))
        right = "t"
    inputs = ["x", right]
    if op.startswith("Gemm") and bias:
        shape = {"n": (n,), "1": (1,), "mn": (5, n)}[bias]
        weights.append(init("b", normal(*shape, seed=2)))
        inputs.append("b")
    attributes: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "transB": int(rows)} if op.startswith("Gemm") else {}
    nodes.append(node(op.split(maxsplit=1)[0] if op.startswith("Gemm") else "MatMul", inputs, ["y"], **attributes))
    path = save(folder, model(nodes, [value("x", [5, k])], [value("y", [5, n])], weights))
    graph, written = split(path, parts, folder)
    products = [each for each in graph.graph if each.op_type in ("MatMul", "Gemm")]
    assert len(products) == len(panels(n, parts)) > 1
    assert all(matrix_of(each) is not None for each in products)
    sample = {"x": normal(5, k, seed=3)}
    np.testing.assert_allclose(run(written, sample)["y"], run(path, sample)["y"], rtol=1e-5, atol=1e-5)


def tied(folder: Path, turned: bool) -> Path:
    """An embedding of 600 rows that is also the output matrix."""
    nodes = [node("Gather", ["table", "i"], ["h"])]
    if turned:
        nodes += [node("Transpose", ["table"], ["t"], perm=[1, 0]), node("MatMul", ["h", "t"], ["y"])]
    else:
        nodes.append(node("Gemm", ["h", "table"], ["y"], transB=1))
    weights = [beside(folder, "table", normal(600, 64))]
    return save(folder, model(nodes, [value("i", [5], onnx.TensorProto.INT64)], [value("y", [5, 600])], weights))


@pytest.mark.parametrize("turned", [False, True])
def test_panels_of_a_tied_table_are_stored_once(tmp_path: Path, turned: bool) -> None:
    path = tied(tmp_path, turned)
    graph, written = split(path, 3, tmp_path)
    assert (written.parent / "weights.bin").stat().st_size == 600 * 64 * 4
    panels_ = [t for t in graph.graph.initializers.values() if ".columns" in (t.name or "")]
    assert [each.const_value.offset for each in panels_] == [0, 256 * 192, 256 * 384]  # type: ignore[union-attr]
    sample = {"i": np.array([0, 1, 599, 300, 7])}
    np.testing.assert_allclose(run(written, sample)["y"], run(path, sample)["y"], rtol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_what_would_be_turned_in_memory_is_split_in_the_source_too(tmp_path: Path, turned: bool) -> None:
    graph = load_model(tied(tmp_path, turned))
    run_passes(graph, NORMALIZE)
    asked = [SplitColumns("y", 3), SplitColumns("h", 2)]
    assert turned_whole(graph, asked) == (asked[:1] if turned else [])


@pytest.mark.parametrize("scheme", ["int4", "int8-weights"])
@pytest.mark.parametrize("turned", [False, True])
def test_quantized_panels_of_a_tied_table_are_stored_once(tmp_path: Path, turned: bool, scheme: str) -> None:
    path = tied(tmp_path, turned)
    found: dict[int, Array] = {}
    stored: dict[int, int] = {}
    for parts in (1, 3):
        graph = load_model(path)
        run_passes(graph, [*NORMALIZE, *([SplitColumns("y", parts)] if parts > 1 else [])])
        ort.lower(graph, SCHEMES[scheme])
        run_passes(graph, (RemoveDeadCode(), FixNames(), SortNodes()))
        with BundleWriter(tmp_path / f"{parts}.tfb", {}) as writer:
            with writer.weights("segments/weights.bin") as sink:
                writer.add_graph("segments/00.onnx", graph, sink, lambda _: None)
            stored[parts] = sink.tensor_bytes
            found[parts] = run(writer.folder / "segments/00.onnx", {"i": np.array([0, 1, 599, 300, 7])})["y"]
    assert stored[1] == stored[3]
    np.testing.assert_array_equal(found[1], found[3])


def test_panels_are_views_until_they_are_written(tmp_path: Path) -> None:
    save(tmp_path, model([node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 8])], [value("y", [1, 90])],
                         [beside(tmp_path, "w", normal(8, 90))]))  # fmt: skip
    graph = load_model(tmp_path / "model.onnx")
    tensor = graph.graph.initializers["w"].const_value
    assert tensor is not None
    for axis, kind in ((0, ir.ExternalTensor), (1, ir.LazyTensor)):
        part = panel(tensor, axis, 2, 5)
        assert isinstance(part, kind)
        array = part.numpy()
        assert not array.flags.owndata
        np.testing.assert_array_equal(array, np.take(normal(8, 90), range(2, 5), axis))
