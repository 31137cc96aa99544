"""Which bundles are served, and why the others are not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agent.memory import mem_total_bytes
from agent.models import Model, machine_budget, open_model
from targets.arena import Arena, Placed
from targets.bundle import MANIFEST, Segment, read_manifest
from targets.errors import BudgetError, BundleError, TightfitError
from targets.tensor import Contract, DType, TensorSpec
from tests.support import bundles
from tests.support.bundles import MIB, dense, plan_of, rewrite

BUDGET = 3400 * MIB


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.add(tmp_path_factory.mktemp("good") / "add.tfb")


@pytest.fixture
def bundle(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "add.tfb"))


def reopen(bundle: Path, budget: int = BUDGET) -> Model:
    return open_model(bundle, budget)


def test_a_good_bundle(good: Path) -> None:
    model = reopen(good)
    assert (model.name, model.version) == ("add", read_manifest(good).version)
    assert model.layout.slots == 2


def cut_short(bundle: Path) -> None:
    weights = bundle / "segments" / "01.bin"
    os.truncate(weights, weights.stat().st_size - 1)


def change_a_byte(bundle: Path) -> None:
    weights = bundle / "segments" / "01.bin"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)


def other_schema(bundle: Path) -> None:
    fields = json.loads((bundle / MANIFEST).read_bytes())
    (bundle / MANIFEST).write_text(json.dumps({**fields, "schema": 99}))


def link_a_file(bundle: Path) -> None:
    weights = bundle / "segments" / "01.bin"
    weights.rename(bundle / "elsewhere.bin")
    weights.symlink_to(bundle / "elsewhere.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"segments/01.bin has \d+ bytes instead of \d+ \(copy the bundle again\)"),
        (change_a_byte, r"segments/01.bin was changed: its SHA-256 differs"),
        (other_schema, r"schema 99, this version reads 1"),
        (link_a_file, r"segments/01.bin is a link"),
        (lambda b: (b / MANIFEST).unlink(), r"has no manifest.json"),
        (lambda b: (b / MANIFEST).write_bytes(b"{"), r"not a valid manifest"),
        (lambda b: (b / "segments" / "00.onnx").unlink(), r"segments/00.onnx cannot be read"),
        (shutil.rmtree, r"is not there"),
    ],
)
def test_damaged_bundles(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=message):
        reopen(bundle)


def change(bundle: Path, **changes: object) -> None:
    rewrite(bundle, read_manifest(bundle), **changes)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [("tensorrt", "this version has no TensorRT backend"), ("tflite", "'tflite'.*available: onnxruntime")],
)
def test_runtimes_there_are_not(bundle: Path, runtime: str, message: str) -> None:
    change(bundle, runtime=runtime)
    with pytest.raises(BundleError, match=message):
        reopen(bundle)


def test_a_type_without_a_wire_form(bundle: Path) -> None:
    odd = TensorSpec("y", DType.BFLOAT16, (2,), 4)
    change(bundle, contract=Contract((odd,), (), {}))
    with pytest.raises(BundleError, match=r"y bfloat16\[2\] has a type that this version cannot"):
        reopen(bundle)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment("segments/00.onnx", ("a", "c"), ("total",))], "00.onnx needs 'c', which nothing before it makes"),
        ([Segment("segments/00.onnx", ("a", "b"), ("total",))], "no segment makes output 'scaled'"),
    ],
)
def test_segments_that_do_not_join(bundle: Path, segments: list[Segment], message: str) -> None:
    change(bundle, segments=tuple(segments))
    with pytest.raises(BundleError, match=message):
        reopen(bundle)


def test_a_machine_that_is_too_small(good: Path) -> None:
    with pytest.raises(BudgetError, match=r"board too small for add.*run needs 152.0 MiB, but the budget is 151.5 MiB"):
        reopen(good, 151 * MIB + MIB // 2)


def test_a_plan_past_its_own_board(bundle: Path) -> None:
    plan = read_manifest(bundle).plan
    change(bundle, plan=msgspec.structs.replace(plan, budget_bytes=100 * MIB))
    with pytest.raises(BudgetError, match=r"^phase load needs"):
        reopen(bundle)


def test_a_plan_that_forgets_its_slots(bundle: Path) -> None:
    contract = read_manifest(bundle).contract
    change(bundle, plan=plan_of(contract, 64, io_slots=1024))
    with pytest.raises(BudgetError, match=r"counts 1.0 KiB for its 64 slots, which need 32.0 KiB"):
        reopen(bundle)


def test_a_plan_without_slots(bundle: Path) -> None:
    plan = read_manifest(bundle).plan
    change(bundle, plan=msgspec.structs.replace(plan, slots=0))
    with pytest.raises(BundleError, match="no slots"):
        reopen(bundle)


def test_an_arena_whose_buffers_overlap(bundle: Path) -> None:
    plan = read_manifest(bundle).plan
    buffers = (Placed("a", 0, 2, 64, offset=0), Placed("b", 1, 3, 64, offset=0))
    arena = Arena(height=64, lower_bound=128, alignment=64, buffers=buffers)
    change(bundle, plan=msgspec.structs.replace(plan, arena=arena))
    with pytest.raises(BudgetError, match="live together and overlap"):
        reopen(bundle)


def test_every_type_of_the_protocol_is_served(tmp_path: Path) -> None:
    assert len(reopen(bundles.every_type(tmp_path / "every.tfb")).contract.inputs) == len(bundles.ONNX_TYPES)


def test_the_budget_of_this_machine() -> None:
    assert 0 < machine_budget(0) <= mem_total_bytes() * 85 // 100
    assert machine_budget(1 << 40) < 0


def test_every_refusal_is_of_the_one_root(bundle: Path) -> None:
    change(bundle, contract=Contract((dense("a", DType.FLOAT32, 1),), (), {}))
    with pytest.raises(TightfitError):
        reopen(bundle)
