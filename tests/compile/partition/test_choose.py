"""Models cut as a person asks, compiled and run: the number of segments does not show in the results."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from bench.bundle_runner import BundleRunner
from compile.errors import OptionError
from compile.options import Options
from compile.partition.choose import Outcome, Wishes, choose_cuts
from compile.pipeline import compile_model
from targets.board import Board, load_board
from targets.budget import budget_bytes, check_plan
from targets.bundle import Manifest, Residency, verify_files
from targets.errors import BudgetError
from tests.compile.partition.test_graph import cached, captured, tied, towers, unet
from tests.support.commands import Run, refused, runner
from tests.support.models import Array, init, model, node, normal, prepared, save, value

BOARD = load_board("x86-64-dev")
MIB = 1 << 20


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def sample_of(proto: onnx.ModelProto) -> dict[str, Array]:
    sample: dict[str, Array] = {}
    for entry in proto.graph.input:
        shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        whole = entry.type.tensor_type.elem_type == TensorProto.INT64
        seed = len(sample)
        sample[entry.name] = np.random.default_rng(seed).integers(0, 9, shape) if whole else normal(*shape, seed=seed)
    return sample


def plain(path: Path) -> onnxruntime.InferenceSession:
    """A session whose sums do not depend on what stands beside a node: nothing is fused or laid out anew."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_plain(bundle: Path, manifest: Manifest, sample: dict[str, Array]) -> dict[str, Array]:
    values = dict(sample)
    for segment in manifest.segments:
        made = plain(bundle / segment.file).run(list(segment.outputs), {name: values[name] for name in segment.inputs})
        values |= dict(zip(segment.outputs, made, strict=True))
    return {spec.name: np.asarray(values[spec.name]) for spec in manifest.contract.outputs}


def compiled_in(path: Path, out: Path, segments: int) -> tuple[Manifest, int]:
    """The model in so many segments, or in as many as the refusal says that there can be."""
    try:
        return compile_model(path, BOARD, out, Options(segments=segments)), segments
    except OptionError as error:
        most = int(re.findall(r"the graph can have (\d+) segments", str(error))[0])
        return compile_model(path, BOARD, out, Options(segments=most)), most


@pytest.mark.parametrize("build", [unet, tied, captured, cached, towers], ids=lambda build: build.__name__)
@pytest.mark.usefixtures("unobserved")
def test_any_number_of_segments_gives_the_same_outputs(tmp_path: Path, build: Callable[[], onnx.ModelProto]) -> None:
    proto = build()
    path, sample = save(tmp_path, proto), sample_of(proto)
    numbers = []
    for asked in (1, 2, 5, 20):
        out = tmp_path / f"{asked}.tfb"
        manifest, number = compiled_in(path, out, asked)
        numbers.append(number)
        verify_files(out, manifest)
        assert len(manifest.segments) == number
        assert manifest.options["segments"] == str(number)
        exact, packed = run_plain(out, manifest, sample), BundleRunner(out, 1).run(sample)
        if asked == 1:
            reference = exact
        for name, expected in reference.items():
            np.testing.assert_array_equal(exact[name], expected)
            np.testing.assert_allclose(packed[name], expected, rtol=1e-5, atol=1e-5)
    assert numbers[:3] == [1, 2, 5]
    assert 5 < numbers[3] <= 20


def report(bundle: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((bundle / "report.json").read_text())["cuts"]
    return found


@pytest.mark.usefixtures("unobserved")
def test_the_report_shows_the_greedy_cuts_beside(tmp_path: Path) -> None:
    path, out = save(tmp_path, towers()), tmp_path / "m.tfb"
    compile_model(path, BOARD, out, Options(max_segment=3 * 32 * 32 * 4))
    cuts = report(out)
    assert cuts["bound_ns"] <= cuts["cost_ns"] <= cuts["greedy_ns"]  # type: ignore[operator]
    assert cuts["exact"] is True


def chain(folder: Path, layers: int, width: int = 64) -> Path:
    nodes = [node("MatMul", [f"h{at}", f"w{at}"], [f"h{at + 1}"], name=f"layer{at}") for at in range(layers)]
    weights = [init(f"w{at}", normal(width, width, seed=at) / 8) for at in range(layers)]
    return save(folder, model(nodes, [value("h0", [1, width])], [value(f"h{layers}", [1, width])], weights))


@pytest.mark.usefixtures("unobserved")
def test_a_cut_stands_where_it_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "m.tfb"
    manifest = compile_model(chain(tmp_path, 6), BOARD, out, Options(cut_at=("h2", "h5")))
    assert [segment.outputs for segment in manifest.segments] == [("h2",), ("h5",), ("h6",)]
    assert manifest.options["cut_at"] == "h2 h5"


@pytest.mark.usefixtures("unobserved")
def test_no_segment_has_more_weights_than_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "m.tfb"
    manifest = compile_model(chain(tmp_path, 6), BOARD, out, Options(max_segment=2 * 64 * 64 * 4))
    assert [segment.outputs for segment in manifest.segments] == [("h2",), ("h4",), ("h6",)]


WISHES = {
    "an unknown value": (["--cut-at", "hh2"], "--cut-at: no value 'hh2' is made .*did you mean 'h2'"),
    "an input": (["--cut-at", "h0"], "--cut-at: no value 'h0' is made .*available: h1, h2, h3, h4"),
    "no segment": (["--segments", "0"], "--segments 0 is no number of segments .give 1 to 99"),
    "too many": (["--segments", "5"], "--segments 5: there are no such cuts; the graph can have 4 segments at most"),
    "too few": (["--segments", "2", "--max-segment", "16kB"], "--max-segment 15.6 KiB: MatMul node 'layer0'"),
    "contradictory": (["--segments", "2", "--max-segment", "16KiB"], "--segments 2: there are no such cuts"),
    "no size": (["--max-segment", "much"], "much"),
}


@pytest.mark.parametrize("kind", WISHES)
@pytest.mark.usefixtures("unobserved")
def test_wishes_that_cannot_be_kept(tightfit: Run, tmp_path: Path, kind: str) -> None:
    options, words = WISHES[kind]
    refused(tightfit, tmp_path, words, chain(tmp_path, 4), "--target", "x86-64-dev", *options)


# -- streaming -------------------------------------------------------------------------------------------------------


def small(mem_total_mib: int) -> Board:
    """A board with so much memory, of which the runtime takes 10 MiB."""
    memory = msgspec.structs.replace(
        BOARD.memory,
        physical_mib=mem_total_mib,
        mem_total_mib=mem_total_mib,
        os_reserve_mib=1,
        contiguous_ceiling_mib=mem_total_mib,
        runtime_fixed_mib=10,
    )
    return msgspec.structs.replace(BOARD, memory=memory)


@pytest.mark.usefixtures("unobserved")
def test_what_the_board_cannot_hold_is_cut_small_so_that_most_of_it_stays(tmp_path: Path) -> None:
    """48 MiB of weights, of which the host could hold all and the board about 28."""
    path, out = chain(tmp_path, 12, 1024), tmp_path / "m.tfb"
    board = small(48)
    manifest = compile_model(path, board, out, Options())
    streamed = [segment for segment in manifest.segments if segment.residency is Residency.STREAMED]
    assert 2 <= len(streamed) < len(manifest.segments)
    check_plan(manifest.plan, budget_bytes(board))
    cuts = report(out)
    assert cuts["bound_ns"] <= cuts["cost_ns"] <= cuts["greedy_ns"]  # type: ignore[operator]
    assert manifest.plan.sweep is not None
    # No cuts let the board hold more than it has room for, and these stream no more than two segments beside.
    room = budget_bytes(board) - manifest.plan.phase("run").total_bytes + 48 * MIB - manifest.plan.sweep.pass_bytes
    assert manifest.plan.sweep.pass_bytes <= 48 * MIB - room + 2 * max(manifest.plan.sweep.segment_bytes)
    assert len(compile_model(path, BOARD, tmp_path / "large.tfb", Options()).segments) == 1


@pytest.mark.usefixtures("unobserved")
def test_a_board_for_which_no_cuts_are_small_enough(tmp_path: Path) -> None:
    path, out = chain(tmp_path, 4, 1024), tmp_path / "m.tfb"
    with pytest.raises(BudgetError) as refusal:
        compile_model(path, small(20), out, Options())
    (enough,) = re.findall(r"budget is 17.0 MiB; ([\d.]+) MiB would do, for MatMul node 'layer\d", str(refusal.value))
    assert 17 < float(enough) < 34
    assert not out.exists()


def test_what_is_streamed_hides_under_all_segments_since_the_last_that_was(tmp_path: Path) -> None:
    """A judge that holds every third segment, on a board whose storage is a tenth as fast as its memory."""
    layers, width, rows = 12, 128, 64
    path = save(
        tmp_path,
        model(
            [node("MatMul", [f"h{at}", f"w{at}"], [f"h{at + 1}"]) for at in range(layers)],
            [value("h0", [rows, width])],
            [value(f"h{layers}", [rows, width])],
            [init(f"w{at}", normal(width, width, seed=at)) for at in range(layers)],
        ),
    )
    weight, crossing = 4 * width * width, 4 * rows * width
    bandwidth = msgspec.structs.replace(BOARD.bandwidth, dram_gb_s=10, storage_read_mb_s=1000)
    runtime = msgspec.structs.replace(BOARD.runtime, launch_us=3)
    board = msgspec.structs.replace(BOARD, bandwidth=bandwidth, runtime=runtime, compute={"float32": 1e3})

    def sizes(ends: Sequence[int]) -> list[int]:
        return [weight * (end - start) for start, end in itertools.pairwise((0, *ends))]

    def judge(ends: Sequence[int]) -> Outcome:
        held = [at % 3 == 2 for at in range(len(ends))]
        read = tuple(0 if stays else nbytes for stays, nbytes in zip(held, sizes(ends), strict=True))
        return Outcome(int(len(ends) == 1), read, 4 * weight, layers * weight)

    def cost(ends: Sequence[int]) -> float:
        """In ns: a segment's weights take a ns for 10 bytes to compute with, and for one to read."""
        read, work = judge(ends).read, [nbytes / 10 for nbytes in sizes(ends)]
        total = len(ends) * 3000 + 2 * (len(ends) - 1) * crossing / 10
        for at, nbytes in enumerate(read):
            if nbytes:
                # The turn of the last streamed segment, and of a held one behind it.
                turns = [at - 1] if read[at - 1] else [at - 2, at - 1]
                total += max(nbytes - sum(work[turn] for turn in turns), 0)
        return total

    graph = prepared(path)
    names = {f"h{at}": crossing for at in range(1, layers + 1)}
    found = choose_cuts(graph, names, names, Wishes(), layers * weight, board, judge)
    assert len(found.ends) > 1
    assert found.cost_ns == pytest.approx(cost(found.ends), abs=len(found.ends) * 3)
    assert found.greedy_ns is not None
    assert found.bound_ns <= found.cost_ns <= found.greedy_ns
    # As good as segments of equal size of any of the limits that are tried.
    for size in (1, 2, 3, 6):
        assert found.cost_ns <= cost(range(size, layers + 1, size)) + 3 * layers
