"""What a node takes at least, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile.graph import load_model
from compile.partition.graph import static_sizes
from compile.partition.work import work_ns
from compile.passes.normalize import InferShapes
from targets.board import load_board
from tests.support.models import init, model, node, normal, save, value

# 12.8 bytes and 230.4 operations a ns.
BOARD = load_board("generic-lpddr4x-4gb")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # For one row 2 * 256 * 256 operations take less than reading 256 KiB of weights.
        (1, 4 * 256 * 256 / 12.8),
        # 4096 rows use each weight as often.
        (4096, 2 * 4096 * 256 * 256 / 230.4),
    ],
)
def test_a_product_takes_its_weights_or_its_operations(tmp_path: Path, rows: int, expected: float) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])]
    proto = model(nodes, [value("x", [rows, 256])], [value("y", [rows, 256])], [init("w", normal(256, 256))])
    graph = load_model(save(tmp_path, proto))
    InferShapes().apply(graph)
    sizes = static_sizes(graph)
    product, relu = graph.graph
    assert work_ns(product, sizes, BOARD) == int(expected)
    # It may be fused into the product.
    assert work_ns(relu, sizes, BOARD) == 0


def test_a_convolution_takes_as_often_as_it_has_pixels(tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    proto = model(
        nodes, [value("x", [1, 64, 32, 32])], [value("y", [1, 64, 32, 32])], [init("w", normal(64, 64, 3, 3))]
    )
    graph = load_model(save(tmp_path, proto))
    (conv,) = graph.graph
    assert work_ns(conv, {"y": 64 * 32 * 32 * 4}, BOARD) == int(2 * 64 * 32 * 32 * 64 * 9 / 230.4)


def test_of_a_table_only_rows_are_read(tmp_path: Path) -> None:
    proto = model(
        [node("Gather", ["table", "i"], ["y"])], [value("i", [1], 7)], [value("y", [1, 64])],
        [init("table", normal(4096, 64))],
    )  # fmt: skip
    (gather,) = load_model(save(tmp_path, proto)).graph
    assert work_ns(gather, {"y": 256}, BOARD) == 0
