"""What goes into a bundle: segments and their weights, the sample, assets."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compile.backends.base import Backend, Part, WeightFootprint
from compile.calibrate.samples import Sample
from compile.errors import OptionError
from compile.partition.graph import extract
from compile.progress import Progress
from compile.shapes import sizes_at
from compile.sizes import check_host_memory
from compile.source import Digests
from compile.text import Tokenizer
from compile.transform import Work, properties_json
from compile.writer import BundleWriter
from targets.board import MIB
from targets.bundle import Residency, SampleTensor, Segment
from targets.generation import TOKENIZER
from targets.recipe import METADATA
from targets.tensor import human

WEIGHTS = "segments/weights.bin"


def write_segments(
    writer: BundleWriter, work: Work, runtime: Backend, host_memory: int, digests: Digests, progress: Progress
) -> tuple[list[Part], list[WeightFootprint], int]:
    """Write every segment; returns where they are, where their weights will be on the board, and weight bytes."""
    planned = work.planned_bytes
    _check_disk(writer, planned)
    progress.phase("quantize and write", planned)
    both = _Both(progress, planned, digests)
    parts: list[Part] = []
    pieces = [work.model] if len(work.cuts) == 1 else [extract(work.model, part) for part in work.cuts]
    footprint = [runtime.weight_footprint(piece, sizes_at(work.dims, "max")) for piece in pieces]
    check_host_memory(pieces, footprint, host_memory)
    with writer.weights(WEIGHTS) as sink:
        if sink.resumed_bytes:
            progress.warn(f"an interrupted compilation left {human(sink.resumed_bytes)} of weights, which are kept")
        for index, (part, piece) in enumerate(zip(work.cuts, pieces, strict=True)):
            path = f"segments/{index:02}.onnx"
            writer.add_graph(path, piece, sink, both.advance)
            parts.append(Part(writer.folder / path, part.inputs, part.outputs))
        return parts, footprint, sink.tensor_bytes + writer.inline_bytes


class _Both(Progress):
    """Passes progress on, and tells the source's digests how far the work is."""

    def __init__(self, progress: Progress, total: int, digests: Digests) -> None:
        self._progress, self._total, self._digests = progress, max(total, 1), digests
        self._done = 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._digests.reached(self._done / self._total)
        self._progress.advance(nbytes)

    def warn(self, text: str) -> None:
        self._progress.warn(text)


def _check_disk(writer: BundleWriter, planned: int) -> None:
    """Refuse before any work what the disk cannot hold; what an interrupted run left there counts as room."""
    left = sum(p.stat().st_size for p in writer.folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(writer.folder).free + left
    needed = planned + planned // 50 + MIB
    if free < needed:
        where = writer.out.absolute().parent
        raise OptionError(f"the bundle needs {human(needed)}; {where} has {human(free)} free", "make room")


def segment_of(folder: Path, part: Part, settings: dict[str, str], residency: Residency) -> Segment:
    file = part.path.relative_to(folder).as_posix()
    own = {**settings, "session.disable_prepacking": "1"} if residency is Residency.UNPACKED else settings
    return Segment(file, part.inputs, part.outputs, own, residency)


def write_sample(writer: BundleWriter, sample: Sample) -> tuple[SampleTensor, ...]:
    """The first sample, raw, for the agent's warm-up; strings are left out, they warm nothing."""
    tensors: list[SampleTensor] = []
    for index, (name, array) in enumerate(sample.items()):
        if array.dtype.kind in "USO":
            return ()
        path = f"sample/{index:02}.bin"
        writer.add(path, np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
        tensors.append(SampleTensor(name, array.shape, path))
    return tuple(tensors)


def write_assets(writer: BundleWriter, assets: Sequence[Path], tokenizer: Tokenizer | None = None) -> tuple[str, ...]:
    if tokenizer is not None:
        writer.add(TOKENIZER, tokenizer.data)
    for path in assets:
        name = f"assets/{path.name}"
        if any(entry.path == name for entry in writer.files):
            raise OptionError(f"two assets are named {path.name}", "rename one; metadata.json is the model's own")
        try:
            writer.add(name, path.read_bytes())
        except OSError as error:
            raise OptionError(f"cannot read asset {path}: {error.strerror}") from None
    return tuple(entry.path for entry in writer.files if entry.path.startswith("assets/"))


def write_properties(writer: BundleWriter, properties: dict[str, str]) -> None:
    """The model's own metadata (labels, alphabets) become an asset."""
    if properties:
        writer.add(METADATA, properties_json(properties))
