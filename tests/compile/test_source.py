"""A source that changes while it is compiled: named, whatever fails first, and nothing is left."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile.errors import ModelError
from compile.graph import load_model
from compile.options import Options
from compile.pipeline import compile_model
from compile.progress import Progress
from compile.shapes import parse_shape
from compile.source import SourceStamp
from targets.board import load_board
from targets.bundle import file_sha256

BOARD = load_board("x86-64-dev")
OPTIONS = Options(shapes=(parse_shape("x=1,2..8,128"),))


@pytest.fixture
def source(transformer: Path, tmp_path: Path) -> Path:
    shutil.copytree(transformer.parent, tmp_path / "source")
    return tmp_path / "source" / transformer.name


class Meddler(Progress):
    """Does something when a phase begins."""

    def __init__(self, phase: str, act: Callable[[], Any]) -> None:
        self._phase, self._act = phase, act

    def phase(self, name: str, total: int = 0) -> None:  # noqa: ARG002 - part of Progress
        if name == self._phase:
            self._act()


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def overwrite(path: Path) -> None:
    """Other weights in the same file, as a second export makes them."""
    with path.open("r+b") as file:
        file.write(b"\x3f" * path.stat().st_size)


def replace(path: Path) -> None:
    """Another file under the name; the old one stays mapped."""
    other = path.with_name("other")
    other.write_bytes(b"\0" * 100)
    other.rename(path)


ACTS: dict[str, Callable[[Path], Any]] = {
    "touched": touch, "overwritten": overwrite, "replaced": replace, "deleted": Path.unlink
}  # fmt: skip


@pytest.mark.parametrize("phase", ["quantize and write", "verify", "finish"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.usefixtures("unobserved")
def test_weights_that_change_are_named(source: Path, tmp_path: Path, act: str, phase: str) -> None:
    weights = source.with_name("small.onnx.data")
    with pytest.raises(ModelError, match=r"small\.onnx\.data( changed while it was compiled|.*No such file)"):
        compile_model(source, BOARD, tmp_path / "m.tfb", OPTIONS, Meddler(phase, lambda: ACTS[act](weights)))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.usefixtures("unobserved")
def test_a_graph_file_that_changes_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"small\.onnx changed while it was compiled"):
        compile_model(source, BOARD, tmp_path / "m.tfb", OPTIONS, Meddler("verify", lambda: touch(source)))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_digests_are_those_of_the_files(source: Path) -> None:
    stamp = SourceStamp.of(source, load_model(source))
    with stamp.hashing() as digests:
        found = digests.source()
    assert (found.file, found.sha256) == (source.name, file_sha256(source))
    assert len(found.weights_sha256) == 64
    overwrite(source.with_name("small.onnx.data"))
    with SourceStamp.of(source, load_model(source)).hashing() as digests:
        assert digests.source().weights_sha256 != found.weights_sha256


def test_hashing_ends_with_the_work(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile.source.AHEAD_BYTES", -1)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), SourceStamp.of(source, load_model(source)).hashing() as digests:  # noqa: PT012
        digests.reached(0.5)
        raise KeyboardInterrupt
    assert threading.active_count() == before
