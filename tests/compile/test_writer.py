"""Bundles appear whole or not at all; tensors stand on page borders; digests are those of the files."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from compile.errors import OptionError
from compile.writer import PAGE, BundleWriter
from targets.bundle import MANIFEST, file_sha256, loads
from tests.support import bundles
from tests.support.models import mlp, prepared

FULL = """
import resource, signal, sys
from pathlib import Path
from compile.writer import BundleWriter
from tests.support.models import prepared
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
graph = prepared(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    with BundleWriter(Path(sys.argv[2]), {}) as writer, writer.weights("segments/weights.bin") as sink:
        writer.add_graph("segments/00.onnx", graph, sink, lambda _: None)
except OSError as error:
    print(error.errno)
"""


def test_external_tensors_stand_on_page_borders_and_digests_match(tmp_path: Path) -> None:
    heard: list[int] = []
    with BundleWriter(tmp_path / "m.tfb", {}) as writer:
        with writer.weights("segments/weights.bin") as sink:
            writer.add_graph("segments/00.onnx", prepared(mlp(tmp_path)), sink, heard.append)
            assert (sink.nbytes, sink.tensor_bytes, sink.resumed_bytes) == (2 * 64 * 96 * 4, 2 * 64 * 96 * 4, 0)
        writer.add("assets/labels.txt", b"a\nb\n")
        assert [entry.path for entry in writer.files] == [
            "assets/labels.txt",
            "segments/00.onnx",
            "segments/weights.bin",
        ]
        for entry in writer.files:
            assert (writer.folder / entry.path).stat().st_size == entry.nbytes
            assert file_sha256(writer.folder / entry.path) == entry.sha256
        proto = onnx.load(str(writer.folder / "segments/00.onnx"), load_external_data=False)
    offsets = [int(e.value) for t in proto.graph.initializer for e in t.external_data if e.key == "offset"]
    assert len(offsets) == 2
    assert all(offset % PAGE == 0 for offset in offsets)
    assert sum(heard) == 2 * 64 * 96 * 4
    assert not list(tmp_path.glob("m.tfb*"))


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), BundleWriter(tmp_path / "m.tfb", {}) as writer:  # noqa: PT012
        writer.add("report.json", b"{}")
        assert writer.folder.is_dir()
        raise ValueError("no")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_what_the_next_run_goes_on_from(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), BundleWriter(tmp_path / "m.tfb", {}) as writer:  # noqa: PT012
        writer.add("report.json", b"{}")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["m.tfb.partial"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = mlp(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(source), str(tmp_path / "m.tfb")],
        capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "27"  # EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    return bundles.identity(tmp_path / "m.tfb", bundles.DType.FLOAT32)


def test_an_existing_bundle_is_replaced_only_when_asked_and_at_once(existing: Path) -> None:
    manifest = loads((existing / MANIFEST).read_bytes())
    with pytest.raises(OptionError, match=r"exists .*--overwrite"), BundleWriter(existing, {}):
        pass
    with BundleWriter(existing, {}, overwrite=True) as writer:
        writer.add("report.json", b"{}")
        assert (existing / "segments/00.onnx").is_file()
        writer.commit(manifest)
    assert sorted(p.name for p in existing.iterdir()) == [MANIFEST, "report.json"]
    assert [p.name for p in existing.parent.iterdir()] == [existing.name]


class _Old:
    """A C library without renameat2."""


@pytest.mark.parametrize("library", ["renameat2 in it", "an old one", "a file system that cannot"])
def test_a_bundle_is_replaced_with_whatever_the_system_has(
    existing: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = loads((existing / MANIFEST).read_bytes())
    if library != "renameat2 in it":
        fake = _Old()
        if library != "an old one":
            fake.renameat2 = lambda *_: -1  # type: ignore[attr-defined]
        monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    with BundleWriter(existing, {}, overwrite=True) as writer:
        writer.add("report.json", b"{}")
        writer.commit(manifest)
    assert sorted(p.name for p in existing.iterdir()) == [MANIFEST, "report.json"]
    assert [p.name for p in existing.parent.iterdir()] == [existing.name]


def test_a_kill_while_the_old_bundle_is_deleted_leaves_the_new_one(
    existing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = loads((existing / MANIFEST).read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with BundleWriter(existing, {}, overwrite=True) as writer:
            writer.add("report.json", b"{}")
            writer.commit(manifest)
    assert sorted(p.name for p in existing.iterdir()) == [MANIFEST, "report.json"]
    assert [p.name for p in existing.parent.iterdir() if p != existing] == ["m.tfb.partial"]
    with BundleWriter(existing, {}, overwrite=True) as writer:
        assert not list(writer.folder.iterdir())


def test_a_failed_replacement_keeps_the_old_bundle(existing: Path) -> None:
    before = (existing / MANIFEST).read_bytes()
    with pytest.raises(ValueError, match="no"), BundleWriter(existing, {}, overwrite=True):
        raise ValueError("no")
    assert (existing / MANIFEST).read_bytes() == before
    assert [p.name for p in existing.parent.iterdir()] == [existing.name]


def test_overwrite_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    with pytest.raises(OptionError, match="not a bundle"), BundleWriter(tmp_path / "precious", {}, overwrite=True):
        pass
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "x"


def test_a_partial_folder_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m.tfb.partial").mkdir()
    (tmp_path / "m.tfb.partial" / "rest").write_bytes(b"x")
    with BundleWriter(tmp_path / "m.tfb", {}) as writer:
        assert not list(writer.folder.iterdir())
    assert not list(tmp_path.iterdir())
