"""Block quantization: error bounds by property, and the packed layout as onnxruntime's kernels read it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.errors import ModelError
from compile.quantize import blockwise
from compile.quantize.blockwise import BlockFormat, BlockQuantized, Once, dequantize_rows, quantize_matrix
from tests.support.models import Array, init, model, node, normal, run, save, value

FORMATS = [BlockFormat(bits, block, zero_point) for bits in (4, 8) for block in (32, 64, 128) for zero_point in (0, 1)]
form_of = st.sampled_from(FORMATS)
finite = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


def quantize_rows(rows: Array, form: BlockFormat) -> BlockQuantized:
    return quantize_matrix("w", rows, True, form)


@st.composite
def matrices(draw: st.DrawFn) -> Array:
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 150)))
    return draw(arrays.arrays(np.float32, shape, elements=finite))


@settings(deadline=None, max_examples=150)
@given(matrices(), form_of)
def test_every_weight_is_within_half_a_step_of_its_code(rows: Array, form: BlockFormat) -> None:
    n, k = rows.shape
    quantized = quantize_rows(rows, form)
    back = dequantize_rows(quantized, form, k)
    assert back.shape == rows.shape
    assert quantized.codes.shape == form.code_shape(n, k)
    step = np.repeat(np.abs(quantized.scales), form.block, axis=1)[:, :k]
    # Symmetric codes have one more value on one side; a weight at the other end is clipped by up to a whole step.
    bound = step if not form.zero_point else step / 2 * (1 + 2e-5)
    error = np.abs(rows - back)
    assert (error <= bound + 1e-6 * np.abs(rows)).all()
    if not form.zero_point:
        inside = np.abs(rows) <= step * ((1 << (form.bits - 1)) - 1)
        assert (error <= step / 2 + 1e-6 * np.abs(rows))[inside].all()


@settings(deadline=None, max_examples=80)
@given(matrices(), form_of)
def test_zeros_are_exact(rows: Array, form: BlockFormat) -> None:
    rows[:, ::3] = 0
    back = dequantize_rows(quantize_rows(rows, form), form, rows.shape[1])
    assert (back[:, ::3] == 0).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("constant", [0.0, 3.25, -1e-3, 1e-30, -7e4, 3e38])
def test_constant_blocks_come_back(form: BlockFormat, constant: float) -> None:
    rows = np.full((2, 70), constant, np.float32)
    quantized = quantize_rows(rows, form)
    assert np.isfinite(quantized.scales).all()
    assert (quantized.scales != 0).all()
    np.testing.assert_allclose(dequantize_rows(quantized, form, 70), rows, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_smallest_and_the_largest_numbers_stay_finite(form: BlockFormat) -> None:
    rows = np.array([[1e-45] * 16, [1.2e-38] * 16, [-3e38, 3e38] * 8], np.float32)
    quantized = quantize_rows(rows, form)
    back = dequantize_rows(quantized, form, 16)
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[:2], rows[:2], atol=1e-36)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_tiles_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch, transposed: bool, form: BlockFormat) -> None:
    rows = normal(37, 300)
    whole = quantize_rows(rows, form)
    for columns, tile_bytes in ((1, 1), (7, 1), (36, 4 * 36 * form.block * 5), (37, 1 << 20)):
        monkeypatch.setattr(blockwise, "TILE_COLUMNS", columns)
        monkeypatch.setattr(blockwise, "TILE_BYTES", tile_bytes)
        parts = quantize_matrix("w", rows if transposed else rows.T, transposed, form)
        np.testing.assert_array_equal(parts.codes, whole.codes)
        np.testing.assert_array_equal(parts.scales, whole.scales)
        if whole.zero_points is not None:
            np.testing.assert_array_equal(parts.zero_points, whole.zero_points)


@pytest.mark.parametrize("transposed", [False, True])
def test_temporaries_do_not_grow_with_the_weight(transposed: bool) -> None:
    weight, form = normal(2048, 4096), BlockFormat(4, 32, True)
    tracemalloc.start()
    try:
        made = quantize_matrix("w", weight, transposed, form)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.zero_points is not None
    result = made.codes.nbytes + made.scales.nbytes + made.zero_points.nbytes
    assert peak < result + blockwise.WORKERS * 3 * blockwise.TILE_BYTES


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_no_code_can_stand_for_is_named(bad: float) -> None:
    weight = normal(64, 8)
    weight[63, 7] = bad
    with pytest.raises(ModelError, match=r"'w' holds 1 (NaN|infinite)"):
        quantize_matrix("w", weight, False, FORMATS[0])


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (1, 64), (3, 70), (17, 129), (8, 256)])
def test_matmulnbits_reads_the_layout(tmp_path: Path, form: BlockFormat, n: int, k: int) -> None:
    weight = normal(k, n, seed=n)
    quantized = quantize_matrix("w", weight, False, form)
    inputs = [init("codes", quantized.codes), init("scales", quantized.scales)]
    if quantized.zero_points is not None:
        inputs.append(init("zeros", quantized.zero_points))
    attributes = {"K": k, "N": n, "bits": form.bits, "block_size": form.block, "accuracy_level": 1}
    names = ["x", *(tensor.name for tensor in inputs)]
    multiply = node("MatMulNBits", names, ["y"], domain="com.microsoft", **attributes)
    path = save(
        tmp_path, model([multiply], [value("x", [k, k])], [value("y", [k, n])], inputs, domains=["com.microsoft"])
    )
    product = run(path, {"x": np.eye(k, dtype=np.float32)})["y"]
    np.testing.assert_allclose(product.T, dequantize_rows(quantized, form, k), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (64, 2)])
def test_gatherblockquantized_reads_the_layout(tmp_path: Path, form: BlockFormat, rows: int, blocks: int) -> None:
    k = form.block * blocks
    table = normal(rows, k)
    quantized = quantize_matrix("w", table, True, form)
    inputs = [init("codes", quantized.codes.reshape(rows, -1)), init("scales", quantized.scales)]
    if quantized.zero_points is not None:
        inputs.append(init("zeros", quantized.zero_points))
    attributes = {"bits": form.bits, "block_size": form.block, "gather_axis": 0, "quantize_axis": 1}
    names = ["codes", "i", *(tensor.name for tensor in inputs[1:])]
    gather = node("GatherBlockQuantized", names, ["y"], domain="com.microsoft", **attributes)
    int64 = value("i", [rows], 7)
    path = save(tmp_path, model([gather], [int64], [value("y", [rows, k])], inputs, domains=["com.microsoft"]))
    read = run(path, {"i": np.arange(rows)})["y"]
    np.testing.assert_allclose(read, dequantize_rows(quantized, form, k), atol=1e-6, rtol=1e-6)


def test_once_computes_once_a_round_and_then_forgets() -> None:
    calls: list[int] = []

    def compute() -> BlockQuantized:
        calls.append(1)
        return quantize_rows(normal(1, 16), FORMATS[0])

    once = Once(compute, 3)
    first = [once.get() for _ in range(3)]
    assert len(calls) == 1
    assert first[0] is first[2]
    once.get()
    assert len(calls) == 2
