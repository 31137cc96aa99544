"""compile_model(): the one place that says what happens in which order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np

from compile import memory
from compile.backends.base import Backend, Trace, backend
from compile.calibrate import Sample, corners, random_samples, read_samples
from compile.errors import ModelError, OptionError
from compile.graph import external_files, ir, load_model, nodes_of, weight_nbytes
from compile.passes.base import Pass, run_passes
from compile.passes.fold import FoldConstants
from compile.passes.normalize import FixNames, InferShapes, InlineFunctions, LiftConstants, RemoveDeadCode, SortNodes
from compile.quantize.schemes import Scheme, choose_scheme
from compile.report import report_json
from compile.shapes import ShapeRequest, bind_shapes, build_contract, largest_nbytes, sizes_at
from compile.verify import FLOAT_LIMIT, compare
from compile.writer import BundleWriter
from targets.board import MIB, Board
from targets.budget import MemoryPlan, budget_bytes, check_plan
from targets.bundle import NAME, SCHEMA, Manifest, Quantization, SampleTensor, Segment, Source, Verification
from targets.bundle import file_sha256 as sha256_of
from targets.errors import BudgetError
from targets.tensor import Contract, DimRange, human

SEGMENT = "segments/00.onnx"
WEIGHTS = "weights.bin"

NORMALIZE: tuple[Pass, ...] = (
    InlineFunctions(),
    LiftConstants(),
    SortNodes(),
    FixNames(),
    InferShapes(),
    FoldConstants(),
    LiftConstants(),
    RemoveDeadCode(),
    FixNames(),
    SortNodes(),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person can choose. `max_error`: limit of relative L2 per output, None for the scheme's default."""

    scheme: str = "fp32"
    shapes: tuple[ShapeRequest, ...] = ()
    calib: Path | None = None
    samples: int = 8
    assets: tuple[Path, ...] = ()
    name: str = ""
    slots: int = 2
    max_error: float | None = None
    overwrite: bool = False

    def recorded(self) -> dict[str, str]:
        """The options that shape the bundle, as the manifest keeps them: no paths."""
        return {
            "scheme": self.scheme,
            "shapes": " ".join(f"{name}={','.join(map(str, dims))}" for name, dims in self.shapes),
            "samples": str(self.samples),
            "slots": str(self.slots),
        }


class Progress:
    """Hears what the pipeline does; the default stays silent."""

    def phase(self, name: str, total: int = 0) -> None:
        """A phase begins; `total` is its size in bytes, 0 where that is not known."""

    def advance(self, nbytes: int) -> None:
        """So much of the phase is done."""

    def warn(self, text: str) -> None:
        """Something that the person should know."""


def compile_model(
    source: Path, board: Board, out: Path, options: Options, progress: Progress | None = None
) -> Manifest:
    """Compile an ONNX file for a board into the bundle `out`; returns its manifest.

    Raises a TightfitError that names what is wrong; then `out` is as it was before.
    """
    progress = progress or Progress()
    runtime = backend(board.runtime.name)
    scheme = choose_scheme(options.scheme, board)
    name = _model_name(options.name or source.stem)

    progress.phase("read")
    model = load_model(source)
    origin = _digests(model, source, progress)
    source_bytes = weight_nbytes(model)
    _check_opset(model, board)

    progress.phase("transform")
    dims = bind_shapes(model, options.shapes)
    run_passes(model, NORMALIZE)
    inputs_only = _inputs_contract(model, dims)
    _check_sizes(model, inputs_only, board)
    samples, origin_of_samples = _samples(model, inputs_only, options, progress)
    lowered = runtime.lower(model, scheme)
    run_passes(model, (RemoveDeadCode(), FixNames(), SortNodes()))

    with BundleWriter(out, options.overwrite) as writer:
        progress.phase("quantize and write", sum(tensor.nbytes for tensor in _initializers(model)))
        _strip_metadata(model, writer)
        writer.add_graph(SEGMENT, WEIGHTS, model, progress.advance)
        weight_bytes = weight_nbytes(model)
        settings = runtime.session_settings(scheme)

        progress.phase("verify")
        segment = writer.folder / SEGMENT
        errors = compare(
            runtime.load(source, {}), runtime.load(segment, settings), samples, _error_limit(options, scheme)
        )

        progress.phase("plan memory")
        largest = random_samples(model, inputs_only, ("max",))[0]
        trace = runtime.observe(segment, settings, largest)
        contract = build_contract(model, dims, trace.output_nbytes)
        plan = _plan(board, runtime, segment, settings, largest, trace, model, contract, options.slots)
        check_plan(plan, budget_bytes(board))

        progress.phase("finish")
        quantization = Quantization(scheme.name, lowered.quantized, lowered.left, source_bytes, weight_bytes)
        verification = Verification(origin_of_samples, len(samples), errors)
        sample = _write_sample(writer, samples[0])
        assets = _write_assets(writer, options.assets)
        writer.add("report.json", report_json(name, board.name, quantization, verification, plan))
        manifest = Manifest(
            schema=SCHEMA,
            name=name,
            target=board.name,
            runtime=board.runtime.name,
            source=origin,
            contract=contract,
            segments=(_segment(model, settings),),
            plan=plan,
            quantization=quantization,
            verification=verification,
            sample=sample,
            assets=assets,
            options=options.recorded(),
            tools=_tools(runtime),
            files=writer.files,
        )
        writer.commit(manifest)
    return manifest


def _model_name(text: str) -> str:
    """A file name as a model name: what stands in URLs and topics has a narrow alphabet."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text).lstrip("._-")[:100]
    if not NAME.fullmatch(name):
        raise OptionError(f"no model name can be made of {text!r}", "give one with --name")
    return name


def _digests(model: ir.Model, source: Path, progress: Progress) -> Source:
    """SHA-256 of the model file and of its external files, in the order of their names."""
    files = external_files(model)
    digest = hashlib.sha256()
    for location in sorted(files):
        digest.update(f"{location}\0{sha256_of(files[location], progress.advance)}\n".encode())
    return Source(source.name, sha256_of(source), digest.hexdigest() if files else "")


def _check_opset(model: ir.Model, board: Board) -> None:
    opset = model.graph.opset_imports.get("", 1)
    if opset > board.runtime.max_opset:
        raise ModelError(
            f"the model uses opset {opset}; {board.runtime.name} {board.runtime.version} on {board.name} "
            f"ends at {board.runtime.max_opset}",
            f"export it with opset_version={board.runtime.max_opset} or lower",
        )


def _inputs_contract(model: ir.Model, dims: dict[str, DimRange]) -> Contract:
    """The contract's input half; outputs follow once a run has shown their sizes."""
    full = build_contract(model, dims, {value.name or "": 0 for value in model.graph.outputs})
    return msgspec.structs.replace(full, outputs=())


def _check_sizes(model: ir.Model, contract: Contract, board: Board) -> None:
    """No tensor may be larger than the board allows, before one is made: a small file can ask for terabytes."""
    ceiling = min(budget_bytes(board), board.memory.contiguous_ceiling_mib * MIB)
    hint = "use smaller shapes, or choose a larger board"
    for spec in contract.inputs:
        if spec.max_nbytes > ceiling:
            raise BudgetError(
                f"input {spec.describe()} takes {human(spec.max_nbytes)}; on {board.name} one tensor can have "
                f"{human(ceiling)}",
                hint,
            )
    sizes = sizes_at(contract.dims, "max")
    for node in nodes_of(model):
        for value in node.outputs:
            size = largest_nbytes(value, sizes)
            if size is not None and size > ceiling:
                raise BudgetError(
                    f"{node.op_type} node {node.name!r} makes a tensor of {human(size)}; on {board.name} one "
                    f"tensor can have {human(ceiling)}",
                    hint,
                )


def _samples(model: ir.Model, contract: Contract, options: Options, progress: Progress) -> tuple[list[Sample], str]:
    if options.calib is not None:
        return read_samples(options.calib, contract, options.samples), options.calib.name
    progress.warn("no --calib data: verified on random inputs, which say whether the model runs, not how well")
    return random_samples(model, contract, corners(contract.dims)), "random"


def _initializers(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    return (v.const_value for v in model.graph.initializers.values() if v.const_value is not None)


def _strip_metadata(model: ir.Model, writer: BundleWriter) -> None:
    """The model's own metadata (labels, alphabets) become an asset; documentation strings are dropped."""
    if model.metadata_props:
        text = json.dumps(dict(sorted(model.metadata_props.items())), ensure_ascii=False, indent=1)
        writer.add("assets/metadata.json", text.encode())
    model.metadata_props.clear()
    model.doc_string = ""
    model.producer_name, model.producer_version = "tightfit", ""


def _error_limit(options: Options, scheme: Scheme) -> float | None:
    quantizes = scheme.matmul_bits or scheme.conv_bits or scheme.dynamic
    return options.max_error if options.max_error is not None else (None if quantizes else FLOAT_LIMIT)


def _plan(
    board: Board,
    runtime: Backend,
    segment: Path,
    settings: dict[str, str],
    largest: Sample,
    trace: Trace,
    model: ir.Model,
    contract: Contract,
    slots: int,
) -> MemoryPlan:
    arena = memory.place(memory.activation_buffers(trace))
    practical = memory.arena_in_practice(
        arena.height,
        lambda size: runtime.runs_within(segment, settings, largest, size, trace),
        budget_bytes(board),
    )
    footprint = memory.Footprint(
        weights=runtime.weight_footprint(model),
        workspace=practical - arena.height,
        slot=sum(spec.max_nbytes for spec in (*contract.inputs, *contract.outputs)),
    )
    return memory.plan(board, arena, footprint, slots)


def _segment(model: ir.Model, settings: dict[str, str]) -> Segment:
    inputs = tuple(v.name or "" for v in model.graph.inputs)
    outputs = tuple(v.name or "" for v in model.graph.outputs)
    return Segment(SEGMENT, inputs, outputs, settings=settings)


def _write_sample(writer: BundleWriter, sample: Sample) -> tuple[SampleTensor, ...]:
    """The first sample, raw, for the agent's warm-up; strings are left out, they warm nothing."""
    tensors: list[SampleTensor] = []
    for index, (name, array) in enumerate(sample.items()):
        if array.dtype.kind in "USO":
            return ()
        path = f"sample/{index:02}.bin"
        writer.add(path, np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
        tensors.append(SampleTensor(name, array.shape, path))
    return tuple(tensors)


def _write_assets(writer: BundleWriter, assets: Sequence[Path]) -> tuple[str, ...]:
    for path in assets:
        name = f"assets/{path.name}"
        if any(entry.path == name for entry in writer.files):
            raise OptionError(f"two assets are named {path.name}", "rename one; metadata.json is the model's own")
        try:
            writer.add(name, path.read_bytes())
        except OSError as error:
            raise OptionError(f"cannot read asset {path}: {error.strerror}") from None
    return tuple(entry.path for entry in writer.files if entry.path.startswith("assets/"))


def _tools(runtime: Backend) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("onnx", "onnx-ir", "onnxscript", "numpy")}
    return {"tightfit": metadata.version("tightfit"), "onnxruntime": runtime.version(), **versions}
