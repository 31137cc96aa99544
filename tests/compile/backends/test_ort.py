"""onnxruntime observed: the planned arena suffices for real runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compile.backends import ort, ort_session
from compile.backends.base import BACKENDS, Part, Trace, backend
from compile.errors import OptionError, VerificationError
from compile.memory import activation_buffers, arena_in_practice
from compile.packing.place import place
from compile.quantize.schemes import SCHEMES
from targets.arena import check_arena
from tests.support.models import Array, init, mlp, model, node, normal, save, value

SETTINGS = ort.session_settings(SCHEMES["fp32"])
BIG = 1 << 16
WIDE = [1, BIG]


def chain_in_place(folder: Path) -> Path:
    """Two large products joined by element-wise chains that work in place."""
    nodes = [node("Mul", ["x", "x"], ["a0"])]
    nodes += [node("Relu" if i % 2 else "Neg", [f"a{i}"], [f"a{i + 1}"]) for i in range(6)]
    nodes += [node("Add", ["a6", "x"], ["y"])]
    return save(folder, model(nodes, [value("x", WIDE)], [value("y", WIDE)]))


def views(folder: Path) -> Path:
    """Reshape and Transpose between kernels; the views are read late."""
    nodes = [
        node("Mul", ["x", "x"], ["a"]),
        node("Reshape", ["a", "shape"], ["b"]),
        node("MatMul", ["b", "b"], ["c"]),
        node("Transpose", ["c"], ["d"], perm=[1, 0]),
        node("Add", ["d", "b"], ["e"]),
        node("Reshape", ["e", "back"], ["y"]),
    ]
    weights = [init("shape", np.array([256, 256])), init("back", np.array(WIDE))]
    return save(folder, model(nodes, [value("x", WIDE)], [value("y", WIDE)], weights))


def conditional(folder: Path) -> Path:
    then = helper.make_graph(
        [node("Exp", ["a"], ["t"]), node("Add", ["t", "a"], ["u"])], "then", [], [value("u", WIDE)]
    )
    other = helper.make_graph([node("Neg", ["a"], ["e"])], "else", [], [value("e", WIDE)])
    nodes = [
        node("Mul", ["x", "x"], ["a"]),
        node("ReduceMax", ["a"], ["m"], keepdims=0),
        node("Greater", ["m", "zero"], ["c"]),
        node("If", ["c"], ["z"], then_branch=then, else_branch=other),
        node("Add", ["z", "a"], ["y"]),
    ]
    return save(folder, model(nodes, [value("x", WIDE)], [value("y", WIDE)], [init("zero", np.float32(0))]))


def looped(folder: Path) -> Path:
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["on"]),
            node("Exp", ["s"], ["t"]),
            node("Add", ["t", "a"], ["out"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", WIDE)],
        [value("on", [], TensorProto.BOOL), value("out", WIDE)],
    )
    nodes = [node("Mul", ["x", "x"], ["a"]), node("Loop", ["n", "yes", "x"], ["y"], body=body)]
    weights = [init("n", np.int64(3)), init("yes", np.array(True))]
    return save(folder, model(nodes, [value("x", WIDE)], [value("y", WIDE)], weights))


def several_outputs(folder: Path) -> Path:
    """Outputs of one kernel with different lives, and an output that is read further on."""
    nodes = [
        node("Mul", ["x", "x"], ["a"]),
        node("Split", ["a"], ["p", "q"], axis=1),
        node("Exp", ["p"], ["r"]),
        node("Add", ["r", "q"], ["y"]),
        node("Exp", ["y"], ["z"]),
    ]
    half = [1, BIG // 2]
    outputs = [value("y", half), value("z", half), value("r", half)]
    return save(folder, model(nodes, [value("x", WIDE)], outputs))


def with_scratch(folder: Path) -> Path:
    """A kernel that needs many times its result while it runs."""
    conv = node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    return save(
        folder, model([conv], [value("x", [1, 8, 16, 16])], [value("y", None)], [init("w", normal(8, 2, 5, 5))])
    )


SAMPLE: dict[str, Array] = {"x": np.abs(normal(*WIDE)) / 8}
BUILDERS: dict[Callable[[Path], Path], dict[str, Array]] = {
    chain_in_place: SAMPLE,
    views: SAMPLE,
    conditional: SAMPLE,
    looped: SAMPLE,
    several_outputs: SAMPLE,
    with_scratch: {"x": normal(1, 8, 16, 16)},
}


def whole(path: Path) -> Part:
    """A model file as the one segment of a bundle."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return Part(path, tuple(i.name for i in graph.input), tuple(o.name for o in graph.output))


def needed(path: Path, sample: dict[str, Array]) -> tuple[Trace, int, int]:
    """(trace, planned height, arena that a run was seen to fit)."""
    parts = [whole(path)]
    trace = ort.observe(parts, SETTINGS, sample, parts[0].outputs)
    arena = place(activation_buffers(trace))
    check_arena(arena)
    fits = lambda size: ort.runs_within(parts, SETTINGS, sample, size, trace)  # noqa: E731
    return trace, arena.height, arena_in_practice(arena.height, trace.peak, fits, 1 << 30)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda b: b.__name__)
def test_the_planned_arena_suffices(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    path, sample = build(tmp_path), BUILDERS[build]
    trace, height, practical = needed(path, sample)
    outputs = ort.load(path, SETTINGS).run(sample)
    assert trace.output_nbytes == {name: array.nbytes for name, array in outputs.items()}
    assert height >= max(trace.output_nbytes.values())
    # The search saw a run end inside it; half of the largest output is too little, so the cap is a cap.
    assert not ort.runs_within([whole(path)], SETTINGS, sample, max(trace.output_nbytes.values()) // 2, trace)
    if build is not with_scratch:
        assert practical <= height * 2


def test_weights_stand_outside_the_arena(tmp_path: Path) -> None:
    path = mlp(tmp_path, 2, 512, 512)
    _, height, practical = needed(path, {"x": normal(2, 512)})
    assert height <= practical < 512 * 512


def test_what_cannot_be_loaded_or_run_is_named(tmp_path: Path) -> None:
    proto = model([node("Magic", ["x"], ["y"], domain="acme")], [value("x", [1])], [value("y", [1])], domains=["acme"])
    bad = save(tmp_path, proto)
    with pytest.raises(VerificationError, match=r"onnxruntime cannot load model.onnx: .*acme:Magic"):
        ort.load(bad, SETTINGS)
    with pytest.raises(VerificationError, match="acme:Magic"):
        ort.observe([whole(bad)], SETTINGS, {"x": normal(1)}, ["y"])
    with pytest.raises(VerificationError, match="onnxruntime cannot run the model"):
        ort.load(mlp(tmp_path), SETTINGS).run({"x": normal(2, 63)})


def test_a_runtime_without_a_backend_is_named() -> None:
    assert backend("onnxruntime") is ort
    assert "tensorrt" not in BACKENDS
    with pytest.raises(OptionError, match="no compiler backend for tensorrt"):
        backend("tensorrt")


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "fma avx avx2", True), ("x86_64", "avx2 avx512f avx512bw", True),
        ("x86_64", "avx2 avx512f avx512_vnni", False), ("x86_64", "avx2 avx_vnni", False), ("aarch64", "", False),
    ],
)  # fmt: skip
def test_kernels_that_saturate_are_known_by_what_the_processor_lacks(machine: str, flags: str, expected: bool) -> None:
    assert ort_session.saturates(machine, f"processor\t: 0\nflags\t\t: fpu {flags}\n") is expected
