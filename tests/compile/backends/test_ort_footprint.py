"""The predicted resident memory of a loaded model against the kernel's own figures, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from compile.backends.ort_footprint import weight_footprint
from compile.graph import load_model
from compile.quantize.schemes import SCHEMES, Scheme
from tests.support.models import SCHEME_NAMES, emit, init, model, node, normal, save, value

MEASURE = """
import gc, json, sys
import numpy as np, onnxruntime

def smaps():
    sums = {}
    for line in open("/proc/self/smaps_rollup"):
        key, _, rest = line.partition(":")
        if key in ("Pss_Anon", "Pss_File"):
            sums[key] = int(rest.split()[0]) * 1024
    return sums

def options(settings):
    made = onnxruntime.SessionOptions()
    made.enable_mem_pattern = False
    made.intra_op_num_threads = 1
    for key, entry in settings.items():
        made.add_session_config_entry(key, entry)
    return made

settings = json.loads(sys.argv[2])
providers = ["CPUExecutionProvider"]
warm = onnxruntime.InferenceSession(sys.argv[3], options(settings), providers=providers)
warm.run(None, {"x": np.zeros((1, 1024), np.float32)})
gc.collect()
before = smaps()
session = onnxruntime.InferenceSession(sys.argv[1], options(settings), providers=providers)
gc.collect()
after = smaps()
print(json.dumps({key: after[key] - before[key] for key in before}))
"""


def stack(folder: Path, layers: int) -> Path:
    """4 MiB of weights a layer."""
    nodes = [node("MatMul", [f"a{i}", f"w{i}"], [f"a{i + 1}"], name=f"m{i}") for i in range(layers)]
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    weights = [init(f"w{i}", normal(1024, 1024, seed=i)) for i in range(layers)]
    return save(folder, model(nodes, [value("x", [1, 1024])], [value("y", [1, 1024])], weights))


OTHER_BLOCKS = [
    dataclasses.replace(SCHEMES["int4"], block=128, zero_point=False),
    dataclasses.replace(SCHEMES["int8-weights"], block=32, zero_point=True),
]


@pytest.mark.parametrize(
    "scheme", [*(SCHEMES[name] for name in SCHEME_NAMES), *OTHER_BLOCKS], ids=lambda each: f"{each.name}-{each.block}"
)
def test_the_heap_of_a_loaded_model_is_predicted(tmp_path: Path, scheme: Scheme) -> None:
    settings = {
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "0",
    }
    segment, _ = emit(stack(tmp_path / "large", 15), scheme, tmp_path / "large")
    warm, _ = emit(stack(tmp_path / "small", 1), scheme, tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(segment), json.dumps(settings), str(warm)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    measured = json.loads(done.stdout)["Pss_Anon"]
    predicted = weight_footprint(load_model(segment), {})
    assert predicted.heap > 7 << 20
    assert measured == pytest.approx(predicted.heap + predicted.session, rel=0.15)


def test_a_weight_that_no_kernel_copies_stays_mapped(tmp_path: Path) -> None:
    nodes = [node("Gather", ["t", "i"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    inputs = [value("i", [2], 7)]
    weights = [init("t", normal(100, 64)), init("w", normal(64, 32))]
    segment, _ = emit(save(tmp_path, model(nodes, inputs, [value("y", [2, 32])], weights)), "fp32", tmp_path)
    found = weight_footprint(load_model(segment), {})
    assert found.mapped == found.tables == 7 * 4096  # 100 rows of 256 bytes, in whole pages
    assert found.rows == 2 * 2 * 4096  # each may begin on one page and end on the next
    assert found.heap == 64 * 32 * 4


def test_rows_of_a_table_are_counted_at_the_largest_size_and_columns_are_not_rows(tmp_path: Path) -> None:
    nodes = [node("Gather", ["t", "i"], ["a"]), node("Gather", ["u", "i"], ["b"], axis=1)]
    weights = [init("t", normal(1000, 1024)), init("u", normal(8, 512))]
    made = model(nodes, [value("i", ["n"], 7)], [value("a", ["n", 1024]), value("b", [8, "n"])], weights)
    segment = save(tmp_path, made)
    found = {n: weight_footprint(load_model(segment), {"n": n}) for n in (1, 30, 5000)}
    assert {n: each.rows for n, each in found.items()} == {1: 2 * 4096, 30: 30 * 2 * 4096, 5000: 1000 * 4096}
    assert {each.tables for each in found.values()} == {1000 * 4096}
    assert {each.mapped for each in found.values()} == {1004 * 4096}
    assert weight_footprint(load_model(segment), {}).rows == 1000 * 4096


def test_filters_are_laid_out_one_at_a_time_in_blocks_of_channels(tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "a"], ["m"]), node("Conv", ["m", "b"], ["y"])]
    weights = [init("a", normal(40, 16, 1, 1)), init("b", normal(16, 40, 1, 1))]
    made = model(nodes, [value("x", [1, 16, 4, 4])], [value("y", [1, 16, 4, 4])], weights)
    segment, _ = emit(save(tmp_path, made), "fp32", tmp_path)
    found = weight_footprint(load_model(segment), {})
    assert found.heap == found.rearranged == 2 * 48 * 16 * 4
    assert found.sources == found.mapped == found.transit_file == 0


def test_a_grouped_filter_that_blocks_do_not_divide_stays_as_it_is(tmp_path: Path) -> None:
    weights = [init("w", normal(24, 8, 3, 3))]
    made = model(
        [node("Conv", ["x", "w"], ["y"], group=3)], [value("x", [1, 24, 4, 4])], [value("y", [1, 24, 2, 2])], weights
    )
    segment, _ = emit(save(tmp_path, made), "fp32", tmp_path)
    found = weight_footprint(load_model(segment), {})
    assert (found.heap, found.mapped) == (0, 2 * 4096)


def test_a_table_that_is_also_a_matrix_is_touched_while_it_is_loaded(tmp_path: Path) -> None:
    nodes = [node("Gather", ["t", "i"], ["a"]), node("Gemm", ["a", "t"], ["y"], transB=1)]
    made = model(nodes, [value("i", [2], 7)], [value("y", [2, 96])], [init("t", normal(96, 64))])
    segment, _ = emit(save(tmp_path, made), "fp32", tmp_path)
    found = weight_footprint(load_model(segment), {})
    assert found.heap == found.mapped == found.touched == 96 * 64 * 4
    assert found.transit_file == 0


def test_a_weight_that_is_an_output_counts_where_it_is(tmp_path: Path) -> None:
    """Beside its copy, where a kernel makes one."""
    outputs = [value("y", [1, 64]), value("w", [64, 64])]
    weights, nodes = [init("w", normal(64, 64))], [node("MatMul", ["x", "w"], ["y"])]
    for given, mapped in ((outputs, 64 * 64 * 4), (outputs[:1], 0)):
        path = save(tmp_path, model(nodes, [value("x", [1, 64])], given, weights))
        found = weight_footprint(load_model(path), {})
        assert (found.heap, found.mapped) == (64 * 64 * 4, mapped)
