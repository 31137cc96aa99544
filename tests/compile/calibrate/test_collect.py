"""Collecting: the same ranges whatever the segments and groups, and never more in memory than a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.activations import ActivationCache
from compile.backends import ort
from compile.backends.base import Model
from compile.calibrate.collect import HashedSamples, Stage, collect, groups
from compile.calibrate.collectors import Range
from compile.calibrate.run import calibrate
from compile.calibrate.samples import Sample
from compile.errors import VerificationError
from compile.graph import ir
from compile.partition.graph import static_sizes
from tests.support.models import MINMAX, Array, init, model, node, normal, prepared, save, value

sizes = st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(0, 100)))


@given(sizes, st.integers(1, 100))
def test_groups_keep_the_order_and_the_limit(wanted: dict[str, int | None], limit: int) -> None:
    made = groups(wanted, limit)
    assert [name for group in made for name in group] == list(wanted)
    for group in made:
        known = [wanted[name] for name in group]
        assert group
        assert len(group) == 1 or sum(size for size in known if size is not None) <= limit
        assert len(group) == 1 or None not in known


def chain(folder: Path, layers: int) -> Path:
    nodes = [node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(layers)]
    weights = [init(f"w{i}", normal(64, 64, seed=i) / 8) for i in range(layers)]
    return save(folder, model(nodes, [value("v0", [4, 64])], [value(f"v{layers}", [4, 64])], weights))


class Watched:
    """The onnxruntime backend; counts loads, and the most bytes of outputs that one model was asked for."""

    def __init__(self) -> None:
        self.loads = 0
        self.most = 0

    def load_mapped(self, graph: ir.Model, folder: Path) -> Model:
        self.loads += 1
        self.most = max(self.most, sum(static_sizes(graph)[output.name or ""] for output in graph.graph.outputs))
        return ort.load_mapped(graph, folder)


@pytest.mark.parametrize(("limit", "loads"), [(1 << 20, 1), (40_000, 3), (17_000, 6)])
def test_segments_and_groups_do_not_change_the_ranges(tmp_path: Path, limit: int, loads: int) -> None:
    path = chain(tmp_path, 6)
    graph = prepared(path)
    names = [f"v{i}" for i in range(7)]
    samples = [{"v0": normal(4, 64, seed=s)} for s in range(3)]
    runtime: Any = Watched()
    scratch = tmp_path / "scratch"
    found = calibrate(graph, names, lambda: samples, MINMAX, runtime, tmp_path, static_sizes(graph), limit, scratch)
    assert runtime.loads == loads
    assert runtime.most <= limit
    assert not scratch.exists()
    expected = np.concatenate([sample["v0"] for sample in samples])
    for index, name in enumerate(names):
        span = found[name]
        assert isinstance(span, Range)
        np.testing.assert_allclose([span.low, span.high], [expected.min(), expected.max()], rtol=1e-4)
        if index < 6:
            expected = expected @ (normal(64, 64, seed=index) / 8)


def test_what_a_killed_run_left_is_no_obstacle(tmp_path: Path) -> None:
    graph = prepared(chain(tmp_path, 4))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "000000.bin").write_bytes(b"old")
    samples = [{"v0": normal(4, 64)}]
    calibrate(graph, ["v4"], lambda: samples, MINMAX, ort, tmp_path, static_sizes(graph), 20_000, scratch)
    assert not scratch.exists()


class Doubler:
    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": 2 * inputs["x"]}


def test_an_output_that_the_runtime_does_not_give_is_named(tmp_path: Path) -> None:
    def load(_outputs: Sequence[str]) -> Doubler:
        return Doubler()

    stage = Stage(("x",), (), {"z": 4}, load)
    with pytest.raises(VerificationError, match="'z'"):
        collect([stage], lambda: [{"x": np.ones(1, np.float32)}], (), ActivationCache(tmp_path, 1 << 20), 1 << 20)


def digest(samples: Sequence[Sample]) -> str:
    """What one pass over all samples leaves behind, and a second one does not change."""
    hashed = HashedSamples(lambda: iter(samples))
    assert (hashed.sha256, len(list(hashed()))) == ("", len(samples))
    first = hashed.sha256
    assert (len(list(hashed())), hashed.sha256) == (len(samples), first)
    return first


def test_the_digest_is_of_names_types_shapes_and_values() -> None:
    base = {"a": np.arange(6, dtype=np.float32)}
    others = [
        [{"b": base["a"]}], [{"a": base["a"].reshape(2, 3)}], [{"a": base["a"].astype(np.float64)}],
        [{"a": base["a"] + 1}], [base, base], [{"a": np.array(["x", "y"], object)}], [],
    ]  # fmt: skip
    digests = [digest([base]), *map(digest, others)]
    assert len(set(digests)) == len(digests)
    assert digest([dict(base)]) == digests[0]
