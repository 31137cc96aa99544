"""Models of which an operator alone does not fit, compiled for small boards and on small hosts."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
import pytest

from compile import sizes
from compile.forms import NORMALIZE
from compile.graph import load_model
from compile.options import Options
from compile.passes.base import run_passes
from compile.passes.split.choose import choose_splits
from compile.passes.split.columns import SplitColumns
from compile.passes.split.plan import Splits
from compile.pipeline import compile_model
from compile.progress import Progress
from compile.shapes import bind_shapes, parse_shape
from targets.board import Board, load_board
from targets.budget import budget_bytes
from targets.bundle import Manifest, verify_files
from targets.errors import BudgetError
from tests.compile.passes.test_split_plan import stack
from tests.compile.test_segments import chained, check_chain, source_run
from tests.support.models import Array, init, model, node, normal, relative, save, value

KIB, MIB = 1 << 10, 1 << 20


class Heard(Progress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def board_of(folder: Path, budget_mib: int) -> Board:
    """A board whose budget is a few MiB, of which the runtime takes 1."""
    text = (files("targets") / "boards" / "x86-64-dev.toml").read_text()
    told = {
        "physical_mib": budget_mib * 20 // 17 + 2,
        "mem_total_mib": budget_mib * 20 // 17 + 1,
        "os_reserve_mib": 1,
        "contiguous_ceiling_mib": budget_mib * 20 // 17 + 1,
        "runtime_fixed_mib": 1,
    }
    for name, number in told.items():
        text = re.sub(rf"^{name} = \d+", f"{name} = {number}", text, flags=re.MULTILINE)
    path = folder / "small.toml"
    path.write_text(text)
    board = load_board(str(path))
    assert abs(budget_bytes(board) - budget_mib * MIB) < MIB
    return board


def compiled(source: Path, board: Board, out: Path, options: Options) -> tuple[Manifest, list[str]]:
    heard = Heard()
    manifest = compile_model(source, board, out, options, heard)
    verify_files(out, manifest)
    check_chain(manifest)
    return manifest, [text for text in heard.warnings if "by columns" in text or "bands of rows" in text]


# -- activations -------------------------------------------------------------------------------------------------------


def prompt(rows: int | str, opset: int = 17) -> onnx.ModelProto:
    """Attention of 8 heads of width 8 on a causal mask that is computed from the number of rows."""
    shape = np.array([0, -1, 8, 8])
    nodes = [
        *(node("MatMul", ["x", f"w{name}"], [f"{name}0"]) for name in "qkv"),
        *(node("Reshape", [f"{name}0", "heads"], [f"{name}1"]) for name in "qkv"),
        *(
            node("Transpose", [f"{name}1"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])
            for name in "qkv"
        ),
        node("MatMul", ["q", "k"], ["scores"]),
        node("Mul", ["scores", "scale"], ["scaled"]),
        node("Softmax", ["scaled"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["o"]),
        node("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "whole"], ["y"]),
    ]
    weights = [*(init(f"w{name}", normal(64, 64, seed=at) / 8) for at, name in enumerate("qkv"))]
    weights += [init("heads", shape), init("whole", np.array([0, -1, 64])), init("scale", np.float32(8**-0.5))]
    return model(nodes, [value("x", [1, rows, 64])], [value("y", None)], weights, opset=opset)


@pytest.mark.parametrize("rows", [512, "t"])
def test_a_prompt_that_is_too_long_for_the_board_is_computed_by_slices_of_queries(
    tmp_path: Path, rows: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio of 512 MiB of scores (8 heads of 4096 x 4096) to 300 MiB of budget."""
    source = save(tmp_path, prompt(rows))
    board = board_of(tmp_path, 8 * 300 // 512 + 1)
    options = Options(shapes=(parse_shape("x=1,1..512,64"),) if rows == "t" else (), slots=1)
    with monkeypatch.context() as patch:
        patch.setattr("compile.transform.choose_splits", lambda *_: Splits())
        with pytest.raises(
            BudgetError, match=r"makes a tensor of 8.0 MiB; on small|needs 1\d.\d MiB, but the budget is 5.0"
        ):
            compile_model(source, board, tmp_path / "whole.tfb", options)
    manifest, told = compiled(source, board, tmp_path / "m.tfb", options)
    assert len(told) == 1
    assert re.search(r"needs 1\d.\d MiB of activations.*\(MatMul,Mul,Softmax\) are computed in \d+ bands", told[0])
    run = manifest.plan.phase("run")
    activations = sum(term.nbytes for term in run.terms if term.name in ("activations", "workspace"))
    assert activations < 3.5 * MIB < 8 * MIB
    assert manifest.verification.outputs[0].relative_l2 < 1e-5
    for count in (512,) if rows == 512 else (512, 1, 3, 100):
        x = normal(1, count, 64, seed=count)
        (expected,) = source_run(source, {"x": x})
        assert relative(expected, chained(tmp_path / "m.tfb", manifest, {"x": x})["y"]) < 1e-5


def test_a_large_image_is_computed_in_tiles(tmp_path: Path) -> None:
    source = save(tmp_path, stack(256, (16, 16, 32, 64)))
    before, told = compiled(source, board_of(tmp_path, 40), tmp_path / "large.tfb", Options(slots=1))
    assert told == []
    after, told = compiled(source, board_of(tmp_path, 8), tmp_path / "small.tfb", Options(slots=1))
    assert len(told) == 1

    def arena(manifest: Manifest) -> int:
        return sum(t.nbytes for t in manifest.plan.phase("run").terms if t.name in ("activations", "workspace"))

    assert arena(after) < 0.6 * arena(before)
    assert after.verification.outputs[0].relative_l2 < 1e-5


@pytest.mark.parametrize(("scheme", "limit"), [("int8-static", 0.05), ("int8-weights", 0.02)])
def test_tiles_are_quantized_as_the_whole_would_be(tmp_path: Path, scheme: str, limit: float) -> None:
    """Filters are quantized once for all tiles, unless ranges in front of them differ."""
    source = save(tmp_path, stack(256, (16, 16, 32, 64)))
    options = Options(scheme, slots=1, random=True)
    manifest, told = compiled(source, board_of(tmp_path, 8), tmp_path / "m.tfb", options)
    assert len(told) == 1
    assert manifest.verification.outputs[0].relative_l2 < limit
    whole = compile_model(source, load_board("x86-64-dev"), tmp_path / "whole.tfb", options)
    assert manifest.quantization.quantized["Conv"] > whole.quantization.quantized["Conv"]
    if scheme == "int8-weights":
        assert manifest.quantization.weight_bytes < 1.1 * whole.quantization.weight_bytes


def test_an_operator_that_no_split_helps_is_named_with_the_budget_that_would_do(tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "w"], ["a"]), node("Transpose", ["a"], ["b"], perm=[1, 0, 3, 2], name="turn")]
    nodes.append(node("GlobalAveragePool", ["b"], ["y"]))
    source = save(
        tmp_path, model(nodes, [value("x", [1, 3, 256, 256])], [value("y", None)], [init("w", normal(16, 3, 1, 1))])
    )
    words = (
        r"Transpose node 'turn' needs 8.0 MiB of activations; of the budget of small 6.\d MiB are left for them, and "
        r"it cannot be split far enough: Transpose is not computed by rows .a budget of about \d+.\d MiB would do"
    )
    with pytest.raises(BudgetError, match=words):
        compile_model(source, board_of(tmp_path, 10), tmp_path / "m.tfb", Options(slots=1))
    assert not list(tmp_path.glob("m.tfb*"))


# -- weights -----------------------------------------------------------------------------------------------------------


def decoder(folder: Path, tied: bool, rows: int = 4096) -> Path:
    """An embedding of `rows` x 128, two layers, and the output matrix: the same, or one of its own of 2 MiB."""
    nodes, weights = [node("Gather", ["table", "ids"], ["h0"])], [init("table", normal(rows, 128))]
    for at in range(2):
        weights += [init(f"a{at}", normal(128, 256, seed=at) / 11), init(f"b{at}", normal(256, 128, seed=at + 5) / 16)]
        nodes += [node("MatMul", [f"h{at}", f"a{at}"], [f"u{at}"]), node("Relu", [f"u{at}"], [f"r{at}"])]
        nodes += [node("MatMul", [f"r{at}", f"b{at}"], [f"d{at}"]), node("Add", [f"h{at}", f"d{at}"], [f"h{at + 1}"])]
    if tied:
        nodes += [node("Transpose", ["table"], ["turned"], perm=[1, 0]), node("MatMul", ["h2", "turned"], ["logits"])]
    else:
        weights.append(init("head", normal(128, 4096, seed=9)))
        nodes.append(node("MatMul", ["h2", "head"], ["logits"]))
    proto = model(nodes, [value("ids", [1, "t"], onnx.TensorProto.INT64)], [value("logits", None)], weights)
    folder.mkdir(exist_ok=True)
    onnx.save(proto, folder / "d.onnx", save_as_external_data=True, location="d.bin", size_threshold=1024)
    return folder / "d.onnx"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("scheme", "limit"),
    [("fp32", 1e-5), ("int8-weights", 0.05), ("int4", 0.4), ("int8-dynamic", 0.1), ("int8-static", 0.1)],
)
@pytest.mark.usefixtures("unobserved")
def test_an_output_matrix_that_is_too_large_for_the_host_is_split_over_segments(
    tmp_path: Path, tied: bool, scheme: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "BASE_BYTES", 0)
    monkeypatch.setattr("compile.emit.check_host_memory", lambda *_: None)  # the table alone has more
    source = decoder(tmp_path / "source", tied)
    stored = {
        "fp32": 2 * MIB,
        "int8-weights": 544 * KIB,
        "int4": 320 * KIB,
        "int8-dynamic": 528 * KIB,
        "int8-static": 528 * KIB,
    }[scheme]
    options = Options(scheme, (parse_shape("ids=1,1..6"),), slots=1, host_memory=2 * stored // 3, random=True)
    manifest, told = compiled(source, load_board("x86-64-dev"), tmp_path / "m.tfb", options)
    (said,) = told
    assert re.search(r"MatMul node '.*' has .* of weights, and a segment may have .*: split into [34] by columns", said)
    panels = {name: at for at, each in enumerate(manifest.segments) for name in each.outputs if ".columns" in name}
    assert len(set(panels.values())) >= 2
    ids = np.array([[0, 4095, 17, 2048]])
    (expected,) = source_run(source, {"ids": ids})
    found: Array = chained(tmp_path / "m.tfb", manifest, {"ids": ids})["logits"]
    assert relative(expected, found) < limit
    assert manifest.verification.outputs[0].relative_l2 < limit
    if tied and scheme not in ("int8-dynamic", "int8-static"):
        # Table and matrix are one: their bytes are there once.
        assert manifest.quantization.weight_bytes < 1.3 * (stored + 2 * MIB // 8)


@pytest.mark.parametrize(("budget_mib", "parts"), [(8, 0), (4, 5), (3, 10)])
def test_a_matrix_of_a_model_that_must_be_streamed_is_split_as_the_board_needs(
    tmp_path: Path, budget_mib: int, parts: int
) -> None:
    """A matrix of 2 MiB beside 0.5 of others, and a table that is read by rows: where not all is in memory at once, two
    segments are, and their copies."""
    model = load_model(decoder(tmp_path / "source", tied=False))
    bind_shapes(model, (parse_shape("ids=1,1..2"),))
    run_passes(model, NORMALIZE)
    board = board_of(tmp_path, budget_mib)
    found = choose_splits(model, {}, board, 2 * MIB, 1 << 40, 1 << 40, model.clone).passes
    assert found == ((SplitColumns("logits", parts),) if parts else ())


def test_every_piece_is_a_range_of_what_the_source_makes(tmp_path: Path) -> None:
    """Segments that hold panels are compared one by one."""
    source = decoder(tmp_path / "source", tied=False)
    options = Options("int8-weights", (parse_shape("ids=1,1..2"),), slots=1, host_memory=500 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compile.transform.segment_limit", lambda _: 256 * KIB)
        manifest, _ = compiled(source, load_board("x86-64-dev"), tmp_path / "m.tfb", options)
    errors = manifest.verification.segments
    assert len(errors) == len(manifest.segments) >= 3
    assert all(0 < each.isolated < 0.05 for each in errors[1:])
    assert not any(a.outputs == b.outputs for a, b in itertools.pairwise(manifest.segments))
