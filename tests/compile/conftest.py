"""Models and short cuts that several modules use."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.big_model import Shape, generate
from compile.backends import ort
from compile.backends.base import Trace


@pytest.fixture(scope="session", autouse=True)
def _small_heap() -> None:
    """The compiler collects garbage between steps; the test runner's own objects would make that the longest step."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of six blocks and 4.7 MB whose weights stand beside the file; do not write to it."""
    path = tmp_path_factory.mktemp("transformer") / "small.onnx"
    generate(path, Shape(hidden=128, layers=6, heads=4, dtype="float32"))
    return path


@pytest.fixture
def unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without the processes that observe and measure a run: the plan's activations are then made up."""

    def observe(*arguments: Any) -> Trace:
        results: Sequence[str] = arguments[3]
        return Trace((), dict.fromkeys(results, 1 << 16), 0)

    monkeypatch.setattr(ort, "observe", observe)
    monkeypatch.setattr(ort, "runs_within", lambda *_: True)
