"""Damaged ONNX files: a short run of bench.fuzz_import, and what its runs have found, each reduced to its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from bench.fuzz_import import FINDINGS, Lane, Outcome, run_cases
from bench.mutate_onnx import Seed, make, make_seeds, parsed, whole_case
from compile.backends import ort_session
from compile.quantize.schemes import SCHEMES
from tests.support.commands import Run, refused, runner
from tests.support.models import external, init, model, node, normal, save, value

BOARD = "raspberry-pi-5-4gb"


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def seeds() -> list[Seed]:
    return make_seeds(conformance=False)


# -- the fuzzer ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_damaged_files_end_in_a_bundle_or_in_one_line(seeds: list[Seed]) -> None:
    """Compare: `python -m bench.fuzz_import` runs 100,000 cases, from conformance models too."""
    results = [result for result, _ in run_cases((whole_case(1, number) for number in range(1, 3000)), seeds, 2)]
    assert [f"{result.case}: {result.reason}" for result in results if result.outcome in FINDINGS] == []
    assert {result.outcome for result in results} == {Outcome.COMPILED, Outcome.REFUSED}


def test_a_case_follows_from_its_two_numbers(seeds: list[Seed]) -> None:
    cases = [whole_case(3, number) for number in range(300)]
    assert [make(case, seeds) for case in cases] == [make(case, seeds) for case in cases]
    assert len({make(case, seeds).model for case in cases}) > 250


def test_a_case_without_its_mutations_is_its_seed(seeds: list[Seed]) -> None:
    made = make(dataclasses.replace(whole_case(3, 1), steps=()), seeds)
    assert next(seed for seed in seeds if seed.name == made.origin).weights == made.weights
    assert parsed(made) is not None


def test_a_worker_that_dies_is_a_finding_and_is_replaced(seeds: list[Seed]) -> None:
    case = dataclasses.replace(whole_case(3, 1), steps=())
    with Lane(seeds) as lane:
        lane.kill()
        assert lane.run(case).outcome is Outcome.DIED
        assert lane.run(case).outcome is Outcome.COMPILED


# -- what it found -------------------------------------------------------------------------------------------------

X, Y = value("x", [2, 40]), value("y", None)


def graph(*nodes: onnx.NodeProto, x: onnx.ValueInfoProto = X, **more: Any) -> onnx.ModelProto:
    return model(nodes, [x], [Y], **more)


def image(*nodes: onnx.NodeProto, **more: Any) -> onnx.ModelProto:
    return graph(*nodes, x=value("x", [1, 16, 4, 4]), **more)


def attribute(name: str, kind: int, **held: Any) -> AttributeProto:
    return AttributeProto(name=name, type=kind, **held)


def with_attributes(op: str, *attributes: AttributeProto, inputs: tuple[str, ...] = ("x",)) -> onnx.NodeProto:
    made = node(op, inputs, ["y"])
    made.attribute.extend(attributes)
    return made


def stored(tensor: TensorProto) -> onnx.ModelProto:
    return graph(node("Mul", ["x", "w"], ["y"]), weights=[tensor])


def not_text() -> onnx.ModelProto:
    name = b"odd name"
    data = graph(node("Relu", ["x"], ["y"], name=name.decode())).SerializeToString()
    return onnx.ModelProto.FromString(data.replace(name, b"odd\xffname"))


def calls_itself() -> onnx.ModelProto:
    call = node("F", ["a"], ["b"], domain="local")
    function = helper.make_function("local", "F", ["a"], ["b"], [call], [helper.make_opsetid("local", 1)])
    nodes = [node("F", ["x"], ["y"], domain="local")]
    return model(nodes, [X], [Y], functions=[function], domains=["local"])


def opset(version: int) -> onnx.ModelProto:
    made = graph(node("Relu", ["x"], ["y"]))
    made.opset_import[0].version = version
    return made


def two_opsets() -> onnx.ModelProto:
    made = opset(17)
    made.opset_import.add(domain="ai.onnx", version=13)
    return made


def imports_another(domain: str, op: str, node_domain: str) -> onnx.ModelProto:
    made = model([node(op, ["x"], ["y"], domain=node_domain)], [X], [value("y", [2, 40])], domains=[domain])
    del made.opset_import[0]
    return made


def sparse_with_float_indices() -> onnx.ModelProto:
    made = graph(node("MatMul", ["x", "w"], ["y"]))
    sparse = made.graph.sparse_initializer.add(dims=[40, 4])
    sparse.values.CopyFrom(init("w", np.ones(1, np.float32)))
    sparse.indices.CopyFrom(init("", np.zeros(1, np.float32)))
    return made


def unknown_declared_type() -> onnx.ModelProto:
    made = graph(node("Abs", ["x"], ["a"]), node("Relu", ["a"], ["y"]))
    made.graph.value_info.add(name="a").type.tensor_type.elem_type = 1000
    return made


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    # A segmentation fault in ONNX's version converter.
    "an attribute of another type than its values": (
        lambda: image(
            with_attributes("Upsample", attribute("scales", AttributeProto.INT, floats=[1, 1, 2, 2])), opset=7
        ),
        "attribute 'scales' is INT, and holds floats",
    ),
    "an attribute of another type than its operator's": (
        lambda: image(node("MaxPool", ["x"], ["y"], kernel_shape=[2.0, 2.0])),
        "'kernel_shape' is FLOATS, not INTS",
    ),
    "a body without a graph": (
        lambda: graph(with_attributes("If", attribute("then_branch", AttributeProto.GRAPH))),
        "'then_branch' is GRAPH, and holds nothing",
    ),
    "an attribute for a caller that there is not": (
        lambda: graph(with_attributes("Softmax", attribute("axis", AttributeProto.INT, ref_attr_name="axis"))),
        "attribute 'axis' refers to 'axis'",
    ),
    "an attribute twice": (
        lambda: graph(with_attributes("Softmax", *[attribute("axis", AttributeProto.INT, i=axis) for axis in (0, 1)])),
        "has two attributes 'axis'",
    ),
    "an attribute that the operator has not": (
        lambda: graph(node("Relu", ["x"], ["y"], slope=0.1)),
        "has an attribute 'slope'; its operator has none",
    ),
    "a required attribute that is missing": (
        lambda: image(node("MaxPool", ["x"], ["y"])),
        "lacks its attribute 'kernel_shape'",
    ),
    "too few inputs": (lambda: graph(node("MatMul", ["x"], ["y"])), "has 1 inputs; its operator has 2"),
    "an empty name for a required input": (lambda: graph(node("MatMul", ["x", ""], ["y"])), "lacks its input 1, 'B'"),
    # A segmentation fault in onnxruntime.
    "an empty name among any number of inputs": (
        lambda: graph(node("Max", ["x", ""], ["y"])),
        "lacks its input 1, 'data_0'",
    ),
    "too many outputs": (lambda: graph(node("Relu", ["x"], ["y", "z"])), "has 2 outputs; its operator has 1"),
    # An abort in ONNX's shape inference.
    "more outputs than parts": (
        lambda: graph(node("Split", ["x"], ["y", "z"], num_outputs=1), opset=18),
        "has 2 outputs, and makes 1",
    ),
    "a constant without a value": (
        lambda: graph(node("Constant", [], ["c"]), node("Add", ["x", "c"], ["y"])),
        "has 0 values; a constant has one",
    ),
    "an operator that is gone": (
        lambda: image(node("Upsample", ["x", "s"], ["y"]), weights=[init("s", np.ones(4, np.float32))]),
        "ONNX has no Upsample from opset 10 on",
    ),
    # The folding of constants replaced three outputs by one.
    "an operator of a later opset, with outputs it never had": (
        lambda: graph(node("CastLike", ["x", "x"], ["y", "z"]), opset=9, ir_version=4),
        r"no operator ai\.onnx::CastLike at opset 9",
    ),
    "a tensor without an element type": (lambda: stored(TensorProto(name="w", dims=[40])), "'w' has no element type"),
    "a tensor of an unknown type": (
        lambda: stored(TensorProto(name="w", data_type=1000, dims=[1])),
        "'w' has the unknown element type 1000",
    ),
    "a tensor of another shape than its values": (
        lambda: stored(TensorProto(name="w", data_type=1, dims=[40, 0], float_data=[1.0] * 40)),
        r"'w' needs 0 entries in float_data for its shape \[40, 0\], the file has 40",
    ),
    "a tensor below no size": (
        lambda: stored(TensorProto(name="w", data_type=1, dims=[-1], float_data=[1.0])),
        r"'w' has the shape \[-1\]",
    ),
    "a tensor whose values stand where another type's do": (
        lambda: stored(TensorProto(name="w", data_type=TensorProto.UINT8, dims=[1], float_data=[1.0])),
        "'w' needs 1 entries in int32_data.* the file has 0, and float_data",
    ),
    "strings beside the model": (
        lambda: stored(external("w", [40], TensorProto.STRING, location="w.bin")),
        "'w' holds strings, which cannot stand outside",
    ),
    "a weight file of a name that no disk takes": (
        lambda: stored(external("w", [40], location="w" * 300)),
        "weight file w* cannot be read: File name too long",
    ),
    "a declared value of an unknown type": (unknown_declared_type, "'a' has the unknown element type 1000"),
    "an opset of zero": (lambda: opset(0), "imports opset 0 of 'ai.onnx'"),
    "an opset beyond 32 bits": (lambda: opset(1 << 40), "imports opset 1099511627776 of"),
    # onnxruntime takes its newest for granted; what it was made into imported nothing, which onnxruntime refuses.
    "no opset of ONNX": (
        lambda: imports_another("com.microsoft", "Relu", ""),
        "Relu node '' is one of ONNX's operators, and the model imports no operator set of ONNX",
    ),
    "two opsets": (two_opsets, "imports two opsets of 'ai.onnx'"),
    "a name that is not text": (not_text, r"NodeProto.name b'odd.xffname' is not text in UTF-8"),
    "a function that calls itself": (calls_itself, "functions cannot be inlined: "),
    "sparse indices of float": (sparse_with_float_indices, "indices of type float32, not int64"),
    "a cast to no type": (lambda: graph(node("Cast", ["x"], ["y"], to=0)), "makes 'y' of no element type"),
    "a kernel larger than the image": (
        lambda: image(node("MaxPool", ["x"], ["y"], kernel_shape=[7, 7])),
        r"MaxPool node '.*' makes 'y' of shape \[1,16,-2,-2\]",
    ),
    # Shape inference took the vector for a shape and made 2^31 dimensions of it, 100 GB.
    "a cast of a vector of 2 GiB": (
        lambda: graph(node("Cast", ["x"], ["y"], to=1), x=value("x", [1 << 31], TensorProto.UINT8)),
        "the inputs take 2.0 GiB, and samples of them 16.0 GiB; compiling may take 2.0 GiB",
    ),
    "the same by way of a function of ONNX": (
        lambda: graph(node("CastLike", ["x", "x"], ["y"]), x=value("x", [1 << 31], TensorProto.UINT8)),
        "the inputs take 2.0 GiB, and samples of them 16.0 GiB; compiling may take 2.0 GiB",
    ),
    "no elements, along an axis of 2^62": (
        lambda: graph(node("Relu", ["x"], ["y"]), x=value("x", [1 << 62, 4, 0])),
        "input x float32.4611686018427387904,4,0. has a shape that no memory could hold",
    ),
    "a value larger than the host's memory": (
        lambda: graph(
            node("Expand", ["x", "s"], ["e"]),
            node("ReduceMax", ["e"], ["y"]),
            weights=[init("s", np.array([8 << 20, 2, 40]))],
        ),
        "Expand node '.*' makes a tensor of 2.5 GiB; compiling may take 2.0 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_well_formed_is_refused_in_one_line(tightfit: Run, tmp_path: Path, kind: str) -> None:
    build, words = REFUSED[kind]
    refused(tightfit, tmp_path, words, save(tmp_path, build()), "--target", BOARD)


def test_bytes_in_a_message_of_the_runtime_print_nothing(tightfit: Run, tmp_path: Path) -> None:
    """onnxruntime quotes the attribute, and its Python part prints what it cannot decode."""
    padded = with_attributes("MaxPool", attribute("auto_pad", AttributeProto.STRING, s=b"\xff\xb8"))
    padded.attribute.append(helper.make_attribute("kernel_shape", [2, 2]))
    refused(tightfit, tmp_path, "", save(tmp_path, image(padded)), "--target", BOARD)


def test_a_loop_without_an_end_is_refused(tightfit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "RUN_TIMEOUT_S", 1)
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Tanh", ["s"], ["t"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", [2, 40])],
        [value("on", [], TensorProto.BOOL), value("t", [2, 40])],
    )
    weights = [init("n", np.int64(1 << 62)), init("yes", np.array(True))]
    path = save(tmp_path, graph(node("Loop", ["n", "yes", "x"], ["y"], body=body), weights=weights))
    refused(tightfit, tmp_path, "onnxruntime ran the model for 1 s without an end", path, "--target", BOARD)


@pytest.mark.parametrize("scheme", ["fp32", "int8-static"])
def test_a_run_takes_no_more_than_the_compiler_may(tightfit: Run, tmp_path: Path, scheme: str) -> None:
    """A size that follows from data, 32 GiB: no shape says so before the model runs."""
    nodes = [
        node("NonZero", ["x"], ["z"]),
        node("Shape", ["z"], ["d"]),
        node("Gather", ["d", "one"], ["n"]),
        node("Mul", ["n", "large"], ["s"]),
        node("Expand", ["x", "s"], ["e"]),
        node("ReduceMax", ["e"], ["m"], keepdims=0),
        node("MatMul", ["x", "w"], ["p"]),
        node("Add", ["p", "m"], ["y"]),
    ]
    weights = [init("one", np.array([1])), init("large", np.array([1 << 20, 1, 1])), init("w", normal(40, 40))]
    path = save(tmp_path, graph(*nodes, x=value("x", [1, 40]), weights=weights))
    refused(
        tightfit, tmp_path, "onnxruntime cannot run the model: .*Failed to allocate memory",
        path, "--target", BOARD, "--scheme", scheme, "--random",
    )  # fmt: skip


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.matmul_bits])
def test_infinite_weights_are_refused_without_a_warning(tightfit: Run, tmp_path: Path, scheme: str) -> None:
    weight = normal(40, 40)
    weight[3, 3], weight[3, 4] = np.inf, -np.inf
    path = save(tmp_path, graph(node("MatMul", ["x", "w"], ["y"]), weights=[init("w", weight)]))
    refused(tightfit, tmp_path, "'w' holds 2 infinite", path, "--target", BOARD, "--scheme", scheme)


def test_a_product_of_sizes_beyond_64_bits_is_refused(tightfit: Run, tmp_path: Path) -> None:
    """The folding of constants computes it, in Python."""
    nodes = [
        node("Expand", ["x", "s"], ["e"]),
        node("Size", ["e"], ["n"]),
        node("Cast", ["n"], ["f"], to=1),
        node("Add", ["x", "f"], ["y"]),
    ]
    weights = [init("s", np.array([1 << 40, 1 << 40, 1, 1]))]
    path = save(tmp_path, graph(*nodes, weights=weights))
    refused(tightfit, tmp_path, "Expand .* makes '.*' of shape .*, more than any memory", path, "--target", BOARD)


def test_a_constant_is_not_folded_into_text(tightfit: Run, tmp_path: Path) -> None:
    """What is folded has a size; onnxruntime says what it makes of Abs of text."""
    nodes = [node("CastLike", ["one", "x"], ["t"]), node("Equal", ["x", "t"], ["b"]), node("Abs", ["t"], ["y"])]
    x = value("x", [1], TensorProto.STRING)
    path = save(tmp_path, graph(*nodes, x=x, weights=[init("one", np.float32([1]))], opset=19, ir_version=9))
    refused(tightfit, tmp_path, "Abs|cannot load", path, "--target", BOARD)


def undeclared_type() -> onnx.ModelProto:
    made = graph(node("Abs", ["x"], ["a"]), node("Relu", ["a"], ["y"]))
    made.graph.value_info.add(name="a").type.tensor_type.shape.SetInParent()
    return made


def unknown_entry() -> onnx.ModelProto:
    return stored(external("w", [40], location="w.bin", prepacked="yes"))


def no_opset_that_is_used() -> onnx.ModelProto:
    return imports_another("com.acme", "Gelu", "com.microsoft")


@pytest.mark.parametrize("build", [undeclared_type, unknown_entry, no_opset_that_is_used])
def test_what_says_nothing_is_passed_over(
    tightfit: Run, tmp_path: Path, build: Callable[[], onnx.ModelProto], unobserved: None
) -> None:
    (tmp_path / "w.bin").write_bytes(normal(40).tobytes())
    done = tightfit(save(tmp_path, build()), "--target", BOARD, "-o", tmp_path / "m.tfb")
    assert done.code == 0, done.err


def test_an_axis_beyond_the_rank_is_refused(tightfit: Run, tmp_path: Path) -> None:
    """A Concat along axis 1 of what is declared to be a vector."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Concat", ["h", "v"], ["y"], axis=1)]
    made = model(nodes, [value("x", [2, 8]), value("v", [3])], [value("y", [5])], [init("w", normal(8, 8))])
    refused(tightfit, tmp_path, "must have same rank", save(tmp_path, made), "--target", BOARD)
