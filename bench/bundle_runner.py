"""Runs a bundle's segments in this process, without the agent: for accuracy tables and as the yardstick of latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from processing.answers import Postprocessor
from processing.preprocess import Preprocessor
from targets.bundle import Manifest, read_manifest, verify_files
from targets.recipe import read_labels

Array = NDArray[Any]


def session_of(path: Path, threads: int, settings: Mapping[str, str] | None = None) -> ort.InferenceSession:
    """A session on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    own = {key: value for key, value in (settings or {}).items() if key != "session.use_env_allocators"}
    for key, value in {"session.intra_op.allow_spinning": "0", **own}.items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class BundleRunner:
    """A bundle that was checked, with every segment loaded."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.manifest: Manifest = read_manifest(folder)
        verify_files(folder, self.manifest)
        self._steps = [
            (segment, session_of(folder / segment.file, threads, segment.settings))
            for segment in self.manifest.segments
        ]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs of the contract, by name."""
        values = dict(feeds)
        for segment, session in self._steps:
            given = {name: values[name] for name in segment.inputs}
            values |= dict(zip(segment.outputs, session.run(list(segment.outputs), given), strict=True))
        return {spec.name: np.asarray(values[spec.name]) for spec in self.manifest.contract.outputs}


Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""One inference: inputs in, outputs out, by name."""


class Asker:
    """A bundle's recipe around a model, the compiled one or its source: an image file's bytes in, the answer out."""

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest.recipe is None:
            raise ValueError(f"{folder} has no recipe")
        labels = read_labels(manifest.recipe, manifest.contract, lambda path: (folder / path).read_bytes())
        self._input = manifest.contract.inputs[0].name
        self.before = Preprocessor(manifest.recipe, manifest.contract)
        self.after = Postprocessor(manifest.recipe, manifest.contract, labels)

    def ask(self, image: bytes, run: Run) -> dict[str, Array]:
        """The answer's tensors, by name."""
        tensor, frame = self.before.tensor(image)
        return self.after.answer(run({self._input: tensor}), frame)


def runner_of(session: ort.InferenceSession) -> Run:
    """A whole model as a function of its inputs."""
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def bundle_bytes(folder: Path) -> int:
    """Bytes of all files of a bundle."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
