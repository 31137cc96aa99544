"""Models cut into segments because the host is small: the results, the manifest, and the agent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from compile import sizes
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import Manifest, Residency, read_manifest, verify_files
from tests.cases.forms import FORMS
from tests.cases.test_quantized_cases import CASES
from tests.compile.partition import test_graph
from tests.support.agents import serving
from tests.support.models import SCHEME_NAMES, Array, normal, relative, save

BOARD = load_board("x86-64-dev")
SHAPES = (parse_shape("x=1,2..8,128"),)
LIMITS = {"fp32": 1e-4, "int8-static": 0.15, "int8-dynamic": 0.1, "int8-weights": 0.05, "int4": 0.4}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def only_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the compiler itself took nothing: segments have at most half of `host_memory`."""
    monkeypatch.setattr(sizes, "BASE_BYTES", 0)


def source_run(path: Path, sample: dict[str, Array]) -> list[Array]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, sample))


def chained(bundle: Path, manifest: Manifest, sample: dict[str, Array]) -> dict[str, Array]:
    """Every value that a segment gives, from the bundle's files alone."""
    values = dict(sample)
    for segment in manifest.segments:
        session = onnxruntime.InferenceSession(str(bundle / segment.file), providers=["CPUExecutionProvider"])
        assert {value.name for value in session.get_inputs()} == set(segment.inputs)
        made = session.run(list(segment.outputs), {name: values[name] for name in segment.inputs})
        values.update(zip(segment.outputs, made, strict=True))
    return values


def check_chain(manifest: Manifest) -> None:
    """Every segment takes what the caller or an earlier one gives, and all outputs are given."""
    known = {spec.name for spec in manifest.contract.inputs}
    for segment in manifest.segments:
        assert set(segment.inputs) <= known
        known.update(segment.outputs)
    assert {spec.name for spec in manifest.contract.outputs} <= known


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.usefixtures("unobserved")
def test_the_number_of_segments_does_not_show_in_the_results(transformer: Path, tmp_path: Path, scheme: str) -> None:
    sample = {"x": normal(1, 5, 128, seed=9)}
    (expected,) = source_run(transformer, sample)
    weights, whole = 0, np.zeros(0)
    for at_least in (1, 2, 5):
        out = tmp_path / f"{at_least}.tfb"
        # A segment has at most 1.3 of its fair share, because cuts stand where one value crosses.
        share = 2 * weights * 13 // 10 // at_least if weights else 1 << 30
        manifest = compile_model(transformer, BOARD, out, Options(scheme, SHAPES, host_memory=share, random=True))
        verify_files(out, manifest)
        check_chain(manifest)
        weights = manifest.quantization.weight_bytes
        assert (len(manifest.segments) == 1) if at_least == 1 else (at_least <= len(manifest.segments) <= at_least + 2)
        result = chained(out, manifest, sample)[manifest.contract.outputs[0].name]
        assert relative(expected, result) < LIMITS[scheme]
        whole = whole if whole.size else result
        assert relative(whole, result) < 1e-5

        names = [segment.file for segment in manifest.segments]
        assert names == [f"segments/{index:02}.onnx" for index in range(len(names))]
        for before, after in itertools.pairwise(manifest.segments):
            # Between blocks of a transformer only the residual stream crosses, and not yet added to it, one more.
            assert len(before.outputs) <= 2
            assert set(after.inputs) == set(before.outputs)

        (error,) = manifest.verification.outputs
        found = manifest.verification.segments
        assert len(found) == (len(names) if at_least > 1 else 0)
        if found:
            assert [each.segment for each in found] == [f"{index:02}" for index in range(len(names))]
            assert found[0].isolated == found[0].accumulated
            assert found[-1].accumulated == error.relative_l2
            assert all(0 <= each.isolated <= each.accumulated * 1.1 + 1e-6 for each in found)
            assert all(np.isfinite(each.accumulated) for each in found)


EVERY_FORM: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: form.build for name, form in FORMS.items()},
    **{name: build for name, (build, _) in CASES.items()},
    **{build.__name__: build for build in test_graph.MODELS},
}


@pytest.mark.parametrize("form", EVERY_FORM)
@pytest.mark.usefixtures("unobserved")
def test_every_form_survives_every_cut(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one byte: cut wherever a cut may be, and verified against the source as it is."""
    monkeypatch.setattr("compile.emit.check_host_memory", lambda *_: None)
    path = save(tmp_path, EVERY_FORM[form]())
    shapes = tuple(map(parse_shape, FORMS[form].shapes)) if form in FORMS else ()
    manifest = compile_model(path, BOARD, tmp_path / "m.tfb", Options(shapes=shapes, host_memory=2))
    check_chain(manifest)
    assert max(error.relative_l2 for error in manifest.verification.outputs) < 1e-5
    if form in ("unet", "cached", "tied"):
        assert len(manifest.segments) >= 10


def test_what_the_agent_serves_is_what_was_compiled(transformer: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut.tfb"
    options = Options("int8-weights", SHAPES, host_memory=MIB, residency=Residency.HEAP, name="cut")
    manifest = compile_model(transformer, BOARD, out, options)
    assert read_manifest(out) == manifest
    assert len(manifest.segments) >= 3
    assert {segment.residency for segment in manifest.segments} == {Residency.HEAP}
    (name,) = (spec.name for spec in manifest.contract.outputs)
    with serving(out, tmp_path / "log") as agent:
        for rows in (2, 8, 5):
            x = normal(1, rows, 128, seed=rows)
            (expected,) = source_run(transformer, {"x": x})
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, rows, 128], "data": x.ravel().tolist()}
            status, body, _ = agent.post({"inputs": [tensor]})
            assert status == 200, body
            (output,) = json.loads(body)["outputs"]
            assert (output["name"], output["shape"]) == (name, [1, rows, 128])
            found = np.array(output["data"], np.float32).reshape(1, rows, 128)
            assert relative(expected, found) < LIMITS["int8-weights"]
            np.testing.assert_allclose(found, chained(out, manifest, {"x": x})[name], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unobserved")
def test_rows_of_several_links_are_compared_too(transformer: Path, tmp_path: Path) -> None:
    """A model that is cut has a batch as any other; the shapes that are recorded bind it again."""
    shapes = (parse_shape("x=1..2..4,1..3..8,128"),)
    manifest = compile_model(transformer, BOARD, tmp_path / "m.tfb", Options("int4", shapes, host_memory=MIB))
    assert len(manifest.segments) > 1
    assert manifest.contract.batch == manifest.contract.inputs[0].shape[0] == "batch"
    assert tuple(map(parse_shape, manifest.options["shapes"].split())) == shapes
