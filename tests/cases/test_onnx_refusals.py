"""Files and graphs that cannot be compiled: one line says what, where and what to do, and nothing is left behind."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compile.quantize.schemes import SCHEMES
from tests.support.commands import Run, refused, runner
from tests.support.models import external, init, model, node, normal, save, value

BOARD = "x86-64-dev"
BOOL, HALF = TensorProto.BOOL, TensorProto.FLOAT16
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98101\n"


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


# -- files that are no model ---------------------------------------------------------------------------------------


def a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", b"x")


FILES: dict[str, tuple[bytes | Callable[[Path], Any], str]] = {
    "random": (np.random.default_rng(0).bytes(500), "not a valid ONNX model"),
    "text": (b"hello, this is a text\n" * 20, "not a valid ONNX model"),
    "empty": (b"", "is empty"),
    "zip": (a_zip, "is a zip archive"),
    "json": (b'{"model": 1}', "is JSON"),
    "html": (b"<html>404 Not Found</html>", "is a web page"),
    "tflite": (b"\x1c\0\0\0TFL3" + b"\0" * 50, "is a TensorFlow Lite model"),
    "lfs": (LFS, "git-lfs pointer.*git lfs pull"),
    "pickle": (b"\x80\x02}q\0.", "Python pickle"),
    "folder": (Path.mkdir, "is a folder"),
    "missing": (lambda _: None, "cannot read .*No such file"),
}


@pytest.mark.parametrize("kind", FILES)
def test_not_a_model(tightfit: Run, tmp_path: Path, kind: str) -> None:
    content, words = FILES[kind]
    path = tmp_path / "model.onnx"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    refused(tightfit, tmp_path, words, path, "--target", BOARD)


# -- external data -------------------------------------------------------------------------------------------------


def link(path: Path) -> None:
    path.with_name("real.bin").write_bytes(b"\0" * 4096)
    path.symlink_to("real.bin")


def hard_link(path: Path) -> None:
    path.with_name("real.bin").write_bytes(b"\0" * 4096)
    path.hardlink_to(path.with_name("real.bin"))


ZEROS = b"\0" * 4096
EXTERNAL: dict[str, tuple[dict[str, object], bytes | Callable[[Path], Any], str]] = {
    "missing": ({"location": "w.bin"}, lambda _: None, "weight file w.bin is missing"),
    "truncated": ({"location": "w.bin", "offset": 64, "length": 128}, b"\0" * 100, "ends at byte 192.*has 100"),
    "giant offset": ({"location": "w.bin", "offset": 1 << 62, "length": 128}, ZEROS, "ends at byte"),
    "negative offset": ({"location": "w.bin", "offset": -8, "length": 128}, ZEROS, "'w'|valid ONNX"),
    "words for an offset": ({"location": "w.bin", "offset": "many"}, ZEROS, "not a valid ONNX model"),
    "length mismatch": ({"location": "w.bin", "length": 64}, ZEROS, "needs 128 bytes.*says 64"),
    "parent": ({"location": "../secret.bin"}, ZEROS, "outside the model's folder"),
    "hidden parent": ({"location": "a/../../secret.bin"}, ZEROS, "outside the model's folder"),
    "absolute": ({"location": "/etc/hostname"}, ZEROS, "outside the model's folder"),
    "symlink": ({"location": "w.bin"}, link, "reached through a link"),
    "hard link": ({"location": "w.bin"}, hard_link, "second hard link"),
    "lfs": ({"location": "w.bin"}, LFS + ZEROS, "git-lfs pointer.*git lfs pull"),
    "folder": ({"location": "w.bin"}, Path.mkdir, "not a plain file"),
    "fifo": ({"location": "w.bin"}, os.mkfifo, "not a plain file"),
    "no location": ({"offset": 0}, ZEROS, "outside the model's folder|valid ONNX"),
}


@pytest.mark.parametrize("kind", EXTERNAL)
def test_unsafe_or_broken_external_data(tightfit: Run, tmp_path: Path, kind: str) -> None:
    entries, content, words = EXTERNAL[kind]
    folder = tmp_path / "model"
    multiply = node("MatMul", ["x", "w"], ["y"])
    weights = [external("w", [8, 4], **entries)]
    path = save(folder, model([multiply], [value("x", [1, 8])], [value("y", [1, 4])], weights))
    (tmp_path / "secret.bin").write_bytes(ZEROS)
    if isinstance(content, bytes):
        (folder / "w.bin").write_bytes(content)
    else:
        content(folder / "w.bin")
    refused(tightfit, tmp_path, words, path, "--target", BOARD)


def test_overlapping_weights(tightfit: Run, tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "v"], ["y"])]
    weights = [external("w", [4, 4], location="w.bin"), external("v", [4, 4], location="w.bin", offset=32)]
    path = save(tmp_path, model(nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights))
    (tmp_path / "w.bin").write_bytes(ZEROS)
    refused(tightfit, tmp_path, "'w' and 'v' overlap in w.bin", path, "--target", BOARD)


# -- graphs ----------------------------------------------------------------------------------------------------------


def graph(nodes: list[Any], outputs: list[Any] | None = None, **more: Any) -> onnx.ModelProto:
    return model(nodes, [value("x", [1, 40])], outputs if outputs is not None else [value("y", None)], **more)


def without_opset() -> onnx.ModelProto:
    made = graph([node("Relu", ["x"], ["y"])])
    del made.opset_import[:]
    return made


def short_data() -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=1, dims=[1 << 31, 1 << 31, 8], raw_data=b"\0" * 16)
    return graph([node("MatMul", ["x", "w"], ["y"])], weights=[tensor])


def branching(then: list[Any], output: str = "t", weights: list[Any] | None = None) -> onnx.ModelProto:
    """An If whose then-branch is `then`."""
    body = helper.make_graph(then, "then", [], [value(output, [1, 40])], weights or [])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [value("e", [1, 40])])
    return model(
        [node("If", ["c"], ["y"], then_branch=body, else_branch=other)],
        [value("x", [1, 40]), value("c", [], BOOL)],
        [value("y", [1, 40])],
    )


def sparse(indices: Any, dims: list[int]) -> onnx.ModelProto:
    made = graph([node("MatMul", ["x", "w"], ["y"])])
    values = init("w", np.ones(len(indices), np.float32))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, init("", np.array(indices)), dims))
    return made


def sparse_elsewhere() -> onnx.ModelProto:
    made = sparse([5], [40, 4])
    made.graph.sparse_initializer[0].values.CopyFrom(external("w", [1], location="w.bin"))
    return made


def old(op: str, **attributes: Any) -> onnx.ModelProto:
    channel = [init(name, np.ones(3, np.float32)) for name in "sbmv"]
    inputs = ["x", *"sbmv"] if op == "BatchNormalization" else ["x"]
    return model(
        [node(op, inputs, ["y"], **attributes)], [value("x", [1, 3, 2, 2])], [value("y", [1, 3, 2, 2])],
        channel if op == "BatchNormalization" else [], opset=6, ir_version=3,
    )  # fmt: skip


def bomb(*computed: onnx.NodeProto) -> list[onnx.NodeProto]:
    """84 bytes that ask for 16 GiB; `computed` makes the shape `s`."""
    return [
        *(computed or [node("Constant", [], ["s"], value_ints=[1 << 16, 1 << 16])]),
        node("ConstantOfShape", ["s"], ["c"]),
        node("ReduceSum", ["c"], ["r"], keepdims=0),
        node("Add", ["x", "r"], ["t"]),
    ]


# Abs: a step that ONNX's own propagation of small values does not know.
COMPUTED = (
    node("Constant", [], ["a"], value_ints=[1 << 8, 1 << 8]),
    node("Mul", ["a", "a"], ["m"]),
    node("Abs", ["m"], ["s"]),
)


GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], list[str], str]] = {
    "no outputs": (lambda: graph([node("Relu", ["x"], ["y"])], []), [], "the graph has no outputs"),
    "cycle": (lambda: graph([node("Add", ["x", "y"], ["a"]), node("Relu", ["a"], ["y"])]), [], "has a cycle"),
    "opset too new": (lambda: graph([node("Relu", ["x"], ["y"])], opset=99), [], "opset 99;.*ends at 28"),
    "no opset": (without_opset, [], "imports no operator set"),
    "one name written twice": (
        lambda: graph([node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["a"]), node("Abs", ["a"], ["y"])]),
        [],
        "'a' is redeclared",
    ),
    "one output listed twice": (
        lambda: graph([node("Relu", ["x"], ["y"])], [value("y", [1, 40]), value("y", [1, 40])]),
        [],
        "output 'y' is listed twice",
    ),
    "input from nowhere": (lambda: graph([node("Add", ["x", "q"], ["y"])]), [], "reads 'q', which nothing produces"),
    "custom domain": (
        lambda: graph([node("Magic", ["x"], ["y"], domain="com.acme")], [value("y", [1, 40])], domains=["com.acme"]),
        [],
        r"no operator com\.acme::Magic \(node",
    ),
    "unknown operator": (lambda: graph([node("Magic", ["x"], ["y"])], [value("y", [1, 40])]), [], "Magic"),
    "shape larger than the data": (short_data, [], "'w' needs 147573952589676412928 bytes.*the file has 16"),
    "an input listed twice": (
        lambda: model([node("Relu", ["x"], ["y"])], [value("x", [4]), value("x", [4])], [value("y", [4])]),
        [],
        "input 'x' is listed twice",
    ),
    "a tensor stored twice": (
        lambda: graph([node("Add", ["x", "w"], ["y"])], weights=[init("w", normal(40)), init("w", normal(40, seed=1))]),
        [],
        "tensor 'w' is stored twice in graph 'g'",
    ),
    "an output without a name": (
        lambda: graph([node("Relu", ["x"], [""])], [value("", [1, 40])]),
        [],
        "an output has no name",
    ),
    "output from nowhere": (
        lambda: graph([node("Relu", ["x"], ["a"])], [value("y", [1, 40])]),
        [],
        "nothing produces 'y'",
    ),
    "a branch that reads from nowhere": (
        lambda: branching([node("Add", ["x", "q"], ["t"])]),
        [],
        "reads 'q', which nothing produces",
    ),
    "a branch whose output nothing makes": (
        lambda: branching([node("Relu", ["x"], ["a"])]),
        [],
        "nothing produces 't', an output of graph 'then'",
    ),
    "one name written twice in a branch": (
        lambda: branching([node("Relu", ["x"], ["t"]), node("Neg", ["x"], ["t"])]),
        [],
        "'t' is redeclared",
    ),
    "a cycle in a branch": (
        lambda: branching([node("Add", ["x", "t"], ["a"]), node("Relu", ["a"], ["t"])]),
        [],
        "has a cycle",
    ),
    "IR too new": (
        lambda: model([node("Relu", ["x"], ["y"])], [value("x", [4])], [value("y", [4])], ir_version=99),
        [],
        "has IR version 99; the highest known is",
    ),
    "an operator of a later opset": (
        lambda: graph([node("Gelu", ["x"], ["y"])], [value("y", [1, 40])]),
        [],
        r"no operator ai\.onnx::Gelu at opset 17 \(node",
    ),
    "a custom operator in a branch": (
        lambda: branching([node("Magic", ["x"], ["t"], domain="com.acme", name="spell")]),
        [],
        r"no operator com\.acme::Magic \(node 'spell'\)",
    ),
    "training form of an old opset": (
        lambda: old("BatchNormalization", is_test=0),
        [],
        "cannot raise opset 6 to 7.*opset_version=7 or higher",
    ),
    "sparse index outside the shape": (
        lambda: sparse([160], [40, 4]),
        [],
        "an index outside",
    ),
    "sparse index below zero": (lambda: sparse([[0, -1]], [40, 4]), [], "an index outside"),
    "sparse indices of another rank": (
        lambda: sparse([[0, 0, 0]], [40, 4]),
        [],
        "1 values and indices of shape",
    ),
    "a sparse tensor of terabytes": (
        lambda: sparse([5], [1 << 20, 1 << 20]),
        [],
        r"'w' of shape \[1048576, 1048576\] takes 4096.0 GiB made dense",
    ),
    "sparse values elsewhere": (sparse_elsewhere, [], "sparse tensor 'w' stands outside the model file"),
    "84 bytes that ask for 16 GiB": (
        lambda: graph(bomb(), [value("t", None)]),
        [],
        "ConstantOfShape node '.*' makes a tensor of 16.0 GiB; on x86-64-dev one tensor can have",
    ),
    "the same in a branch": (lambda: branching(bomb()), [], "ConstantOfShape node '.*' makes a tensor of 16.0 GiB"),
    "the same by way of arithmetic": (
        lambda: graph(bomb(*COMPUTED), [value("t", None)]),
        [],
        "ConstantOfShape node '.*' makes a tensor of 16.0 GiB",
    ),
    "the same by way of arithmetic in a branch": (
        lambda: branching(bomb(*COMPUTED)),
        [],
        "ConstantOfShape node '.*' makes a tensor of 16.0 GiB",
    ),
    "an unknown pass": (
        lambda: graph([node("Relu", ["x"], ["y"])]),
        ["--dump-after", "Fold"],
        "--dump-after 'Fold' is no pass .*FoldConstants",
    ),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_that_cannot_be_compiled(tightfit: Run, tmp_path: Path, kind: str) -> None:
    build, options, words = GRAPHS[kind]
    refused(tightfit, tmp_path, words, save(tmp_path, build()), "--target", BOARD, *options)


def with_nan(*shape: int, count: int, dtype: str = "float32") -> onnx.TensorProto:
    array = normal(*shape).astype(dtype)
    array.reshape(-1)[-count:] = np.nan
    return init("w", array)


def half_graph(only: onnx.NodeProto, weight: onnx.TensorProto) -> onnx.ModelProto:
    return model([only], [value("x", [1, 40], HALF)], [value("y", [1, 40], HALF)], [weight])


NAN: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "a matrix": (
        lambda: graph([node("MatMul", ["x", "w"], ["y"])], weights=[with_nan(40, 40, count=3)]),
        "tensor 'w' holds 3 NaN among its 1600 values",
    ),
    "a bias": (
        lambda: graph([node("Add", ["x", "w"], ["y"])], weights=[with_nan(40, count=1)]),
        "tensor 'w' holds 1 NaN among its 40 values",
    ),
    "a factor that would be folded": (
        lambda: graph(
            [node("Mul", ["w", "two"], ["f"]), node("Mul", ["x", "f"], ["y"])],
            weights=[with_nan(1, count=1), init("two", np.float32(2))],
        ),
        "tensor 'w' holds 1 NaN among its 1 values",
    ),
    "a matrix of FP16": (
        lambda: half_graph(node("MatMul", ["x", "w"], ["y"]), with_nan(40, 40, count=3, dtype="float16")),
        "tensor 'w' holds 3 NaN among its 1600 values",
    ),
    "a bias of FP16": (
        lambda: half_graph(node("Add", ["x", "w"], ["y"]), with_nan(40, count=1, dtype="float16")),
        "tensor 'w' holds 1 NaN among its 40 values",
    ),
    "a constant in a branch": (
        lambda: branching(
            [node("Constant", [], ["w"], value=with_nan(1, 40, count=2)), node("Add", ["x", "w"], ["t"])]
        ),
        "tensor 'w' holds 2 NaN among its 40 values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if not scheme.calibrated])
@pytest.mark.parametrize("kind", NAN)
def test_nan_is_refused_by_name_and_count(tightfit: Run, tmp_path: Path, kind: str, scheme: str) -> None:
    build, words = NAN[kind]
    refused(tightfit, tmp_path, words, save(tmp_path, build()), "--target", BOARD, "--scheme", scheme)


def test_nan_is_found_in_weights_beside_the_model(tightfit: Run, tmp_path: Path) -> None:
    """More than one piece of the stream: the last value of the last one."""
    size = (9 << 20) // 4
    array = np.zeros(size, np.float32)
    array[-1] = np.nan
    (tmp_path / "w.bin").write_bytes(array.tobytes())
    nodes = [node("ReduceMax", ["w"], ["m"], keepdims=0), node("Add", ["x", "m"], ["y"])]
    path = save(tmp_path, graph(nodes, weights=[external("w", [size], location="w.bin")]))
    refused(tightfit, tmp_path, f"tensor 'w' holds 1 NaN among its {size} values", path, "--target", BOARD)


def test_a_tensor_that_no_cut_makes_smaller_names_the_least_memory(tightfit: Run, tmp_path: Path) -> None:
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(4 * 8192 * 14336)
    multiply = node("MatMul", ["x", "w"], ["y"])
    # Of two axes it would be split by columns.
    weights = [external("w", [1, 8192, 14336], location="w.bin")]
    path = save(tmp_path, model([multiply], [value("x", [1, 1, 8192])], [value("y", [1, 1, 14336])], weights))
    words = (
        "segment 00 needs 448.0 MiB and cannot be cut, its tensor 'w' has 448.0 MiB .say --host-memory 648MiB or more"
    )
    refused(tightfit, tmp_path, words, path, "--target", BOARD, "--host-memory", "600MiB")
