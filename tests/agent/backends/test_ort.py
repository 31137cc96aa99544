"""What a bundle may and may not ask of the runtime."""

from __future__ import annotations

from pathlib import Path

import msgspec

from targets.bundle import read_manifest
from tests.support import bundles
from tests.support.agents import run_agent


def test_a_bundle_cannot_set_what_is_not_its_business(tmp_path: Path) -> None:
    bundle = bundles.add(tmp_path / "add.tfb")
    manifest = read_manifest(bundle)
    settings = {"session.load_model_format": "ORT"}
    segments = tuple(msgspec.structs.replace(segment, settings=settings) for segment in manifest.segments)
    bundles.rewrite(bundle, manifest, segments=segments)
    code, _, error = run_agent("serve", "--bundle", str(bundle), "--port", "0")
    assert code == 2
    assert "the bundle sets 'session.load_model_format' of onnxruntime, which no bundle may" in error
    assert "Traceback" not in error
