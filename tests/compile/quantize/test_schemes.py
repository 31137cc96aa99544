"""Schemes: what a board can execute, and what can be chosen of the blocks; all of it run against the source."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from compile.errors import OptionError
from compile.quantize.blockwise import BlockFormat, dequantize_rows, quantize_matrix
from compile.quantize.schemes import BLOCKS, SCHEMES, Scheme, choose_scheme
from targets.board import load_board
from targets.tensor import DType
from tests.support.models import SCHEME_NAMES, Array, emit, init, model, node, normal, relative, run, save, value

BOARD = load_board("x86-64-dev")
BLOCKED = tuple(name for name, scheme in SCHEMES.items() if scheme.block)
CHOICES = [
    choose_scheme(name, BOARD, block, symmetric) for name in BLOCKED for block in BLOCKS for symmetric in (False, True)
]


def label(scheme: Scheme) -> str:
    return f"{scheme.name}-{scheme.block}-{'zero points' if scheme.zero_point else 'symmetric'}"


def form_of(scheme: Scheme) -> BlockFormat:
    return BlockFormat(scheme.matmul_bits, scheme.block, scheme.zero_point)


# -- what may be chosen ------------------------------------------------------------------------------------------


def test_schemes_keep_their_own_blocks_unless_asked() -> None:
    assert {name: SCHEMES[name].recorded() for name in BLOCKED} == {
        "int8-weights": {"block": "64", "symmetric": "true"},
        "int4": {"block": "32", "symmetric": "false"},
    }
    for name in SCHEME_NAMES:
        scheme = SCHEMES[name]
        chosen = choose_scheme(name, BOARD)
        assert dataclasses.replace(chosen, largest_code=scheme.largest_code) == scheme
        assert chosen.recorded().keys() == ({"block", "symmetric"} if name in BLOCKED else set())


@pytest.mark.parametrize("scheme", [name for name in SCHEME_NAMES if name not in BLOCKED])
@pytest.mark.parametrize(
    ("block", "symmetric", "words"),
    [
        (32, None, r"--block 32: scheme"),
        (None, True, r"--symmetric: scheme"),
        (None, False, r"--zero-points: scheme"),
        (64, True, r"--block 64 and --symmetric: scheme"),
    ],
)
def test_a_scheme_without_blocks_names_those_with(
    scheme: str, block: int | None, symmetric: bool | None, words: str
) -> None:
    with pytest.raises(OptionError, match=f"{words} '{scheme}' does not .*those that do: int8-weights, int4"):
        choose_scheme(scheme, BOARD, block, symmetric)


@pytest.mark.parametrize("block", [-32, 0, 16, 48, 96, 256])
def test_a_block_length_that_is_not_there_names_those_that_are(block: int) -> None:
    with pytest.raises(OptionError, match=rf"--block {block} is no block length \(available: 32, 64, 128\)"):
        choose_scheme("int4", BOARD, block)


def test_a_board_without_the_type_comes_first() -> None:
    dtypes = [dtype for dtype in BOARD.runtime.dtypes if dtype is not DType.INT4]
    board = msgspec.structs.replace(BOARD, runtime=msgspec.structs.replace(BOARD.runtime, dtypes=dtypes))
    with pytest.raises(OptionError, match=r"scheme 'int4' needs int4, .* cannot execute"):
        choose_scheme("int4", board, 33)


@pytest.mark.parametrize("board", ["raspberry-pi-5-4gb", "x86-64-dev"])
def test_fp16_is_for_boards_that_compute_in_it(board: str) -> None:
    """onnxruntime takes FP16 there, and computes in FP32."""
    assert choose_scheme("fp16", load_board("jetson-orin-nano-4gb")).half
    with pytest.raises(OptionError, match=rf"needs float16, which {board} .* \(available there: fp32, int8-dynamic"):
        choose_scheme("fp16", load_board(board))


# -- what is computed with them ------------------------------------------------------------------------------------


def codes_of_data(rows: int, k: int) -> Array:
    """Whole numbers whose largest in any block is 127: the kernels round activations to 8 bits, and these exactly. No
    two neighbours are large, since kernels may add two products with 8-bit weights in 16 bits."""
    x = np.random.default_rng(k).integers(-63, 64, (rows, k)).astype(np.float32)
    x[:, ::16], x[:, 1::16] = 127, 0
    return x


def matmul(k: int) -> onnx.ModelProto:
    product = node("MatMul", ["x", "w"], ["y"])
    return model([product], [value("x", [4, k])], [value("y", [4, 40])], [init("w", normal(k, 40))])


def gemm(k: int) -> onnx.ModelProto:
    product = node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    weights = [init("w", normal(40, k)), init("b", normal(40))]
    return model([product], [value("x", [4, k])], [value("y", [4, 40])], weights)


def table(k: int) -> onnx.ModelProto:
    lookup = node("Gather", ["w", "i"], ["e"])
    return model([lookup], [value("i", [40], 7)], [value("e", [40, k])], [init("w", normal(40, k))])


def tied(k: int) -> onnx.ModelProto:
    nodes = [
        node("Gather", ["w", "i"], ["e"]),
        node("Transpose", ["w"], ["t"], perm=[1, 0]),
        node("MatMul", ["x", "t"], ["y"]),
    ]
    inputs = [value("i", [40], 7), value("x", [4, k])]
    return model(nodes, inputs, [value("e", [40, k]), value("y", [4, 40])], [init("w", normal(40, k))])


def rounded(proto: onnx.ModelProto, form: BlockFormat) -> onnx.ModelProto:
    """The same graph on the weights that the codes stand for."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    tensor = next(each for each in made.graph.initializer if each.name == "w")
    weight = onnx.numpy_helper.to_array(tensor)
    by_rows = made.graph.node[0].op_type != "MatMul"
    rows = dequantize_rows(quantize_matrix("w", weight, by_rows, form), form, weight.shape[1 if by_rows else 0])
    tensor.CopyFrom(init("w", rows if by_rows else np.ascontiguousarray(rows.T)))
    return made


@pytest.mark.parametrize("scheme", CHOICES, ids=label)
@pytest.mark.parametrize("blocks", [2.0, 3.0, 2.25], ids=["even", "odd", "ragged"])
@pytest.mark.parametrize("build", [matmul, gemm, table, tied])
def test_every_choice_computes_with_the_rounded_weights(
    tmp_path: Path, scheme: Scheme, build: Callable[[int], onnx.ModelProto], blocks: float
) -> None:
    k = int(blocks * scheme.block)
    proto = build(k)
    form = form_of(scheme)
    segment, report = emit(save(tmp_path, proto), scheme, tmp_path)
    given = {"x": codes_of_data(4, k), "i": np.arange(40)}
    inputs = {each.name: given[each.name] for each in proto.graph.input}
    source, found = run(tmp_path / "model.onnx", inputs), run(segment, inputs)
    expected = run(save(tmp_path, rounded(proto, form), "rounded.onnx"), inputs)
    # Rows that blocks do not divide stay as they are, since the kernel knows no last block that is shorter.
    left = {row.op: row.reason for row in report.left}
    assert set(left) == ({"Gather"} if "e" in found and blocks % 1 else set())
    if left:
        assert f"no multiple of the block of {scheme.block}" in left["Gather"]
        expected["e"] = source["e"]
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-5 * float(np.abs(array).max()))
    if not left:
        assert all(1e-4 < relative(source[name], found[name]) < 0.2 for name in found)


def heavy_tailed(rows: int, k: int) -> Array:
    return np.random.default_rng(0).standard_t(3, (rows, k)).astype(np.float32)


def skewed(rows: int, k: int) -> Array:
    return np.random.default_rng(0).lognormal(size=(rows, k)).astype(np.float32)


def error(weight: Array, form: BlockFormat) -> float:
    return relative(weight, dequantize_rows(quantize_matrix("w", weight, True, form), form, weight.shape[1]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
def test_shorter_blocks_are_closer_on_heavy_tails(bits: int, zero_point: bool) -> None:
    errors = [error(heavy_tailed(128, 1024), BlockFormat(bits, block, zero_point)) for block in BLOCKS]
    assert all(1.1 * finer < coarser for finer, coarser in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", BLOCKS)
def test_zero_points_are_closer_on_skewed_weights(bits: int, block: int) -> None:
    weight = skewed(128, 1024)
    assert 1.5 * error(weight, BlockFormat(bits, block, True)) < error(weight, BlockFormat(bits, block, False))
