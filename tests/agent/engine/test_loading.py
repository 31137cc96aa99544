"""The bundle's sample: it warms the engine up, and says what passes take."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.engine.channel import Layout, Load, Run, Slab
from agent.engine.loading import Loaded, load, manifest_of, measure, put_sample, warm_up
from agent.errors import AgentError
from targets.bundle import SampleTensor, read_manifest
from targets.errors import BundleError
from tests.support import bundles


def slab_of(folder: Path) -> Slab:
    manifest = read_manifest(folder)
    slab = Slab.create(Layout.of(manifest.contract, manifest.plan.slots))
    slab.close_fd()
    return slab


def message_of(folder: Path, sample_slot: int | None = 0) -> Load:
    manifest = read_manifest(folder)
    residencies = tuple(segment.residency.value for segment in manifest.segments)
    return Load(str(folder), manifest.digest, 1, "info", "json", residencies, "", sample_slot=sample_slot)


def loaded(folder: Path, slab: Slab, sample_slot: int | None = 0) -> Loaded:
    message = message_of(folder, sample_slot)
    return load(message, manifest_of(message), slab)


def sample_of(folder: Path, slab: Slab, slot: int = 0) -> Run:
    return put_sample(folder, read_manifest(folder), slab, slot)


@pytest.mark.parametrize(("slots", "rows"), [(8, [1, 2, 4, 8]), (6, [1, 2, 4, 6]), (20, [1, 2, 4, 8]), (1, [1])])
def test_batches_are_measured_up_to_the_largest_that_can_come(tmp_path: Path, slots: int, rows: list[int]) -> None:
    folder = bundles.picking(tmp_path / "picking.tfb", slots)
    slab = slab_of(folder)
    engine = loaded(folder, slab).engine
    costs = measure(engine, read_manifest(folder), sample_of(folder, slab), 1e-6, limit_s=60)
    assert [number for number, _ in costs] == rows
    assert all(seconds > 0 for _, seconds in costs)


def test_measuring_ends_in_time(tmp_path: Path) -> None:
    """What it is to take is less than another pass: then there is one point, that of the pass that was made anyway."""
    folder = bundles.picking(tmp_path / "picking.tfb")
    slab = slab_of(folder)
    engine = loaded(folder, slab).engine
    assert measure(engine, read_manifest(folder), sample_of(folder, slab), 0.25, limit_s=0.2) == ((1, 0.25),)


def test_a_sample_of_several_rows_is_taken_apart(tmp_path: Path) -> None:
    """Requests of one row are what comes mostly, whatever the sample is."""
    folder = bundles.picking(tmp_path / "picking.tfb")
    (folder / "sample" / "0.bin").write_bytes(bytes(3 * 32))
    (folder / "sample" / "1.bin").write_bytes(bytes(3 * 8))
    sample = (SampleTensor("x", (3, 8), "sample/0.bin"), SampleTensor("at", (3,), "sample/1.bin"))
    bundles.rewrite(folder, read_manifest(folder), sample=sample)
    slab = slab_of(folder)
    engine = loaded(folder, slab).engine
    costs = measure(engine, read_manifest(folder), sample_of(folder, slab), 1e-6, limit_s=60)
    assert [number for number, _ in costs] == [1, 2, 4, 8]


def test_without_a_batch_a_pass_is_one_request(tmp_path: Path) -> None:
    folder = bundles.picking(tmp_path / "picking.tfb", batch=None)
    found = loaded(folder, slab_of(folder))
    assert [number for number, _ in found.costs] == [1]
    assert 0 < found.costs[0][1] <= found.warm_s


def test_an_engine_without_a_slot_of_its_own_leaves_all_as_they_are(tmp_path: Path) -> None:
    """Requests may wait in them for the engine that follows one that died."""
    folder = bundles.picking(tmp_path / "picking.tfb")
    slab = slab_of(folder)
    views = [slab.input(slot, index) for slot in range(8) for index in range(2)]
    for view in views:
        view[:] = 77
    found = loaded(folder, slab, None)
    assert (found.warm_s, found.costs) == (0, ())
    assert all((view == 77).all() for view in views)
    loaded(folder, slab, 5)
    assert [(view == 77).all() for view in views] == [at not in (10, 11) for at in range(16)]


def test_a_bundle_that_changed_is_not_loaded(tmp_path: Path) -> None:
    message = msgspec.structs.replace(message_of(bundles.add(tmp_path / "add.tfb")), digest="0" * 64)
    with pytest.raises(BundleError, match="the bundle changed after it was verified"):
        manifest_of(message)


def test_a_sample_that_does_not_run_is_said(tmp_path: Path) -> None:
    folder = bundles.growing(tmp_path / "growing.tfb")
    (folder / "sample").mkdir()
    (folder / "sample" / "0.bin").write_bytes(np.array([17]).tobytes())
    bundles.rewrite(folder, read_manifest(folder), sample=(SampleTensor("n", (1,), "sample/0.bin"),))
    with pytest.raises(AgentError, match="the bundle's own sample does not run: output 'y' has 68 B"):
        loaded(folder, slab_of(folder))


def test_the_sample_must_fit_its_shape(tmp_path: Path) -> None:
    folder = bundles.add(tmp_path / "add.tfb")
    slab = slab_of(folder)
    engine = loaded(folder, slab).engine
    assert warm_up(engine, sample_of(folder, slab, 1)) > 0
    (folder / "sample" / "1.bin").write_bytes(bytes(36))
    with pytest.raises(BundleError, match="does not run: that of input 'b' has 36 B, which does not fit its shape"):
        sample_of(folder, slab)
