"""compile_model(): the one place that says what happens in which order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from compile import memory
from compile.activations import ActivationCache
from compile.backends.base import Backend, Lowered, Model, Part, Trace, WeightFootprint, backend
from compile.bounded import BoundedModel
from compile.calibrate.collect import HashedSamples
from compile.calibrate.collectors import DEFAULT_METHOD, METHODS, Range, Unfit
from compile.calibrate.control import control_inputs
from compile.calibrate.run import calibrate
from compile.calibrate.samples import Sample, iterate, read_samples, readers_of
from compile.calibrate.synthetic import corners, largest_sample, random_samples
from compile.dump import check_pass_name, dump_after
from compile.errors import DataError, ModelError, OptionError, VerificationError
from compile.forms import NORMALIZE, SIMPLIFY, SOURCE_FORM, SourceForms, link_limit, source_chain
from compile.graph import initializers, ir, load_model, weight_nbytes
from compile.packing.place import place
from compile.page import page
from compile.partition.choose import Outcome, Wishes, choose_cuts
from compile.partition.codes import Codes, InFloats, codes_of, in_floats
from compile.partition.cuts import Cuts
from compile.partition.graph import Cut, extract, order_of, positions, segments, static_sizes
from compile.partition.tables import peak_bytes
from compile.passes.base import run_passes
from compile.passes.normalize import (
    FixNames,
    RemoveDeadCode,
    SortNodes,
)
from compile.passes.quantizers import QuantizeAtOnce
from compile.passes.split.choose import choose_splits
from compile.passes.split.columns import turned_whole
from compile.passes.split.pieces import Piece, cutting_links, pieces_of, wholes
from compile.passes.split.plan import Splits
from compile.passes.widen import holds_half
from compile.quantize.schemes import SCHEMES, Scheme, choose_scheme
from compile.quantize.source import check_scales
from compile.report import report_json, warnings
from compile.shapes import (
    ShapeRequest,
    bind_shapes,
    build_contract,
    contract_inputs,
    find_batch,
    largest_nbytes,
    sizes_at,
)
from compile.sizes import check_host_memory, check_inputs, check_sizes, largest_value, segment_limit
from compile.source import Digests, SourceStamp
from compile.verify import FLOAT_LIMIT, HALF_LIMIT, Link, verify, verify_rows
from compile.writer import BundleWriter
from targets.arena import Arena
from targets.board import MIB, Board, board_digest
from targets.budget import MemoryPlan, budget_bytes, check_plan
from targets.bundle import (
    NAME,
    SCHEMA,
    Manifest,
    OutputError,
    Quantization,
    Residency,
    SampleTensor,
    Segment,
    SegmentError,
    Verification,
    sealed,
)
from targets.errors import did_you_mean
from targets.recipe import METADATA, Recipe, check_input, check_outputs, memory_bytes, read_labels
from targets.tensor import Contract, DimRange, human

WEIGHTS = "segments/weights.bin"
# Random samples to calibrate on, for each corner of the dimension ranges.
RANDOM_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person can choose. `max_error`: limit of relative L2 per output, None for the scheme's default.

    `block`: weights that share a scale; `symmetric`: without zero points; None for the scheme's default.
    `host_memory`: bytes that compiling may take, whatever the model's size; larger models are cut into more segments.
    `batch_axis`: name of the dimension along which requests can be put together; by default what is found.
    `segments`, `max_segment`, `cut_at`: how it is cut, see `Wishes`; by default as is best for host and board.
    `calib`: what to verify on, and, by a scheme that is calibrated, to calibrate on with the method `calibrate_with`;
    `random`: calibrate on random values instead.
    `dump_after`: the pass after which the graph is written to the folder `dump_to`, by default the bundle's.
    """

    scheme: str = "fp32"
    shapes: tuple[ShapeRequest, ...] = ()
    calib: Path | None = None
    calibrate_with: str = DEFAULT_METHOD
    random: bool = False
    samples: int = 8
    assets: tuple[Path, ...] = ()
    name: str = ""
    slots: int = 2
    max_error: float | None = None
    overwrite: bool = False
    host_memory: int = 2 << 30
    residency: Residency | None = None
    dump_after: str = ""
    dump_to: Path | None = None
    recipe: Recipe | None = None
    block: int | None = None
    symmetric: bool | None = None
    segments: int | None = None
    max_segment: int | None = None
    cut_at: tuple[str, ...] = ()

    @property
    def wishes(self) -> Wishes:
        """What is asked of the cuts. Raises OptionError."""
        return Wishes(self.segments, self.max_segment, self.cut_at)

    batch_axis: str = ""

    def recorded(self) -> dict[str, str]:
        """The options that shape the bundle, as the manifest keeps them: no paths."""
        return {
            "scheme": self.scheme,
            "shapes": " ".join(f"{name}={','.join(dim.spelled() for dim in dims)}" for name, dims in self.shapes),
            "batch_axis": self.batch_axis,
            "samples": str(self.samples),
            "slots": str(self.slots),
            "host_memory": str(self.host_memory),
            "residency": self.residency.value if self.residency else "",
            **self.wishes.recorded(),
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
    scheme = choose_scheme(options.scheme, board, options.block, options.symmetric)
    _check_options(options)
    runtime = backend(board.runtime.name)
    work = _transform(source, out, board, options, runtime, scheme, progress)
    with BundleWriter(out, work.head, options.overwrite) as writer, work.stamp.hashing() as digests:
        parts, weights, weight_bytes = _write_segments(writer, work, runtime, options.host_memory, digests, progress)

        progress.phase("verify")
        errors, segment_errors = _verify(writer, options, runtime, work, parts)
        batch = _verified_batch(writer, options, runtime, work, parts)

        progress.phase("plan memory")
        contract, residencies, plan = _plan(board, options, runtime, work, parts, weights, batch)
        check_plan(plan, budget_bytes(board))

        progress.phase("finish")
        quantized = work.lowered
        quantization = Quantization(scheme.name, quantized.quantized, quantized.left, work.source_bytes, weight_bytes)
        verification = Verification(
            work.sample_origin, len(work.samples), errors, segment_errors if len(parts) > 1 else ()
        )
        _write_properties(writer, work.properties)
        sample = _write_sample(writer, work.samples[0])
        assets = _write_assets(writer, options.assets)
        segments = tuple(
            _segment(writer.folder, part, work.settings, residency)
            for part, residency in zip(parts, residencies, strict=True)
        )
        said = [*work.notes, *warnings(verification)]
        writer.add(
            "report.json",
            report_json(work.name, board.name, work.recorded, quantization, verification, plan, said, work.chosen),
        )
        writer.add(
            "report.html",
            page(work.name, board, work.recorded, contract, segments, quantization, verification, plan, said),
        )
        manifest = sealed(
            Manifest(
                schema=SCHEMA,
                name=work.name,
                target=board.name,
                runtime=board.runtime.name,
                source=digests.source(),
                contract=contract,
                segments=segments,
                plan=plan,
                quantization=quantization,
                verification=verification,
                sample=sample,
                assets=assets,
                options=work.recorded,
                tools=_tools(runtime),
                files=writer.files,
                recipe=options.recipe,
            )
        )
        writer.commit(manifest)
    return manifest


@dataclasses.dataclass(frozen=True)
class _Work:
    """The model after every change that needs no weights, and what is known of it. `head` is all that the bundle's
    bytes depend on; `scheme_is_blocked`: matrices are quantized in blocks; `notes`: what the passes had to say;
    `batch`: the dimension that may be the batch."""

    name: str
    model: ir.Model
    dims: dict[str, DimRange]
    inputs: Contract
    samples: list[Sample]
    sample_origin: str
    notes: tuple[str, ...]
    recorded: dict[str, str]
    lowered: Lowered
    cuts: list[Cut]
    chosen: Cuts | None
    codes: dict[str, Codes]
    pieces: dict[str, Piece]
    settings: dict[str, str]
    properties: dict[str, str]
    source_bytes: int
    half: bool
    stamp: SourceStamp
    forms: SourceForms
    head: dict[str, Any]
    error_limit: float | None
    scheme_is_blocked: bool
    batch: str | None

    @property
    def planned_bytes(self) -> int:
        """Bytes of all weights as they will be written; a weight that is stored once may count twice."""
        return sum(tensor.nbytes for tensor in initializers(self.model))

    @property
    def results(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.outputs]


def _check_options(options: Options) -> None:
    """What can be refused before the model is looked at."""
    segment_limit(options.host_memory)
    options.wishes.recorded()
    if options.calibrate_with not in METHODS:
        raise OptionError(f"unknown method {options.calibrate_with!r}", did_you_mean(options.calibrate_with, METHODS))
    if SCHEMES[options.scheme].static and options.calib is None and not options.random:
        raise OptionError(
            f"--scheme {options.scheme} needs samples to find the ranges of activations",
            "give them with --calib, or say --random for ranges that are guesses",
        )
    if options.dump_after:
        check_pass_name(options.dump_after, NORMALIZE)
    if options.max_error is not None and not options.max_error >= 0:
        raise OptionError(f"--max-error {options.max_error} is no limit", "give a number that is zero or more")
    names = [path.name for path in options.assets]
    for path in options.assets:
        if names.count(path.name) > 1:
            raise OptionError(f"two assets are named {path.name}", "rename one")
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise OptionError(f"cannot read asset {path}: {error.strerror}") from None


def _transform(
    source: Path, out: Path, board: Board, options: Options, runtime: Backend, scheme: Scheme, progress: Progress
) -> _Work:
    """Read the model and do everything to it that needs no weights."""
    name = _model_name(options.name or source.stem)
    progress.phase("read")
    model = load_model(source)
    _check_opset(model, board)
    runtime.check_operators(model)
    check_scales(model)
    stamp = SourceStamp.of(source, model)
    source_bytes = weight_nbytes(model)

    half = holds_half(model)

    progress.phase("transform")
    dims = bind_shapes(model, options.shapes)
    inputs = Contract(contract_inputs(model, dims), (), dims)
    batch = find_batch(inputs, options.batch_axis)
    check_inputs(inputs, board, options.host_memory)
    dump = dump_after(options.dump_after, model, options.dump_to or out.absolute().parent, out.stem)
    notes = run_passes(model, SOURCE_FORM, dump)
    made = {value.name or "" for node in model.graph for value in node.outputs}
    notes += run_passes(model, SIMPLIFY, dump)
    forms = SourceForms(source, options.shapes, made, None if dims else static_sizes(model))
    splits = _split(model, forms, board, options, runtime, scheme, inputs)
    forms.splits = turned_whole(model, splits.passes)
    run_passes(model, splits.passes)
    notes += splits.notes
    for note in notes:
        progress.warn(note)
    runtime.check_operators(model)  # those of functions too, now
    check_sizes(model, dims, board, options.host_memory)
    _check_recipe(model, dims, options)
    samples, sample_origin = _samples(model, inputs, options, progress)
    ranges, found, calibration = _calibrate(model, inputs, forms, out, options, runtime, scheme, progress)
    notes += found
    lowered = runtime.lower(model, scheme, ranges)
    codes, pieces = codes_of(model, forms.made), pieces_of(model, forms.made)
    run_passes(model, (RemoveDeadCode(), FixNames(), SortNodes(), QuantizeAtOnce()))
    properties = dict(model.metadata_props)
    _strip_metadata(model)
    recorded = options.recorded() | scheme.recorded() | calibration
    cuts, chosen = _cut(model, forms, board, options, runtime, inputs, bool(scheme.matmul_bits), codes, pieces)
    head = {"source": stamp.described(), "board": board_digest(board), "options": recorded, **_tools(runtime)}
    return _Work(
        name=name,
        model=model,
        dims=dims,
        inputs=inputs,
        samples=samples,
        sample_origin=sample_origin,
        notes=tuple(notes),
        recorded=recorded,
        lowered=lowered,
        cuts=cuts,
        chosen=chosen,
        codes=codes,
        pieces=pieces,
        settings=runtime.session_settings(scheme),
        properties=properties,
        source_bytes=source_bytes,
        half=half,
        stamp=stamp,
        forms=forms,
        head=head,
        error_limit=_error_limit(options, scheme, half),
        scheme_is_blocked=bool(scheme.matmul_bits),
        batch=batch,
    )


def _split(
    model: ir.Model,
    forms: SourceForms,
    board: Board,
    options: Options,
    runtime: Backend,
    scheme: Scheme,
    inputs: Contract,
) -> Splits:
    """How operators that do not fit alone are split; nothing where all fit."""
    taken = sum(spec.max_nbytes for spec in inputs.inputs)
    given = sum(forms.sizes.get(value.name or "", 0) for value in model.graph.outputs)
    others = memory.beside_model(board, options.slots, taken + given, taken)
    if options.recipe:
        others += memory_bytes(options.recipe, inputs)

    def lowered() -> ir.Model:
        # Without ranges nothing is quantized statically; codes of a dynamic scheme take as much.
        copy = model.clone()
        runtime.lower(copy, SCHEMES["int8-dynamic"] if scheme.static else scheme)
        run_passes(copy, (RemoveDeadCode(),))
        return copy

    limit = segment_limit(options.host_memory)
    return choose_splits(model, forms.sizes, board, others, limit, largest_value(options.host_memory), lowered)


def _calibrate(
    model: ir.Model,
    inputs: Contract,
    forms: SourceForms,
    out: Path,
    options: Options,
    runtime: Backend,
    scheme: Scheme,
    progress: Progress,
) -> tuple[dict[str, Range | Unfit], list[str], dict[str, str]]:
    """Ranges of the activations that the scheme quantizes; what a person should know of them; what identifies them."""
    if not scheme.static:
        return {}, [], {}
    progress.phase("calibrate")
    chosen = random_samples(model, inputs, corners(inputs.dims) * RANDOM_ROUNDS) if options.random else []
    calib = None if options.random else options.calib
    readers = readers_of(options.recipe)

    def samples() -> Iterator[Sample]:
        """All of them, however many: each is looked at once and forgotten."""
        return iter(chosen) if calib is None else iterate(calib, inputs, readers=readers)

    names = runtime.prepare(model, scheme)
    limit = link_limit(segment_limit(options.host_memory), holds_half(model))
    scratch = out.with_name(f"{out.name}.calibration")
    method = options.calibrate_with
    hashed = HashedSamples(samples)
    ranges = calibrate(model, names, hashed, method, runtime, forms.path.parent, forms.sizes, limit, scratch)
    notes = [f"{name!r} stays float: {found.reason}" for name, found in ranges.items() if isinstance(found, Unfit)]
    if calib is None:
        notes.append("calibrated on random values: the ranges are guesses, and accuracy on real data is unknown")
    for note in notes:
        progress.warn(note)
    return ranges, notes, {"calibrate_with": method, "calibrated_on": hashed.sha256}


def _verify(
    writer: BundleWriter, options: Options, runtime: Backend, work: _Work, parts: Sequence[Part]
) -> tuple[tuple[OutputError, ...], tuple[SegmentError, ...]]:
    """Run source and result on the samples; what crosses between segments is kept on the disk of the bundle."""
    compiled = [
        Link(each.path.stem, each.inputs, each.outputs, functools.partial(_load_part, runtime, work, part))
        for part, each in zip(parts, _in_floats(work, parts), strict=True)
    ]
    with writer.scratch() as folder:
        cache = ActivationCache(folder, shutil.disk_usage(folder).free // 2)
        chain = _source_links(options, runtime, work, parts)
        bound = [_bounded(options.host_memory, link) for link in compiled]
        return verify(chain, bound, work.samples, work.results, cache, work.error_limit)


def _in_floats(work: _Work, parts: Sequence[Part]) -> list[Part]:
    """The segments as they look from the source model, which has no codes."""
    return [Part(p.path, in_floats(p.inputs, work.codes), in_floats(p.outputs, work.codes)) for p in parts]


def _load_part(runtime: Backend, work: _Work, part: Part) -> Model:
    model = runtime.load(part.path, work.settings)
    coded = work.codes.keys() & {*part.inputs, *part.outputs}
    return InFloats(model, part.inputs, work.codes) if coded else model


def _source_links(options: Options, runtime: Backend, work: _Work, parts: Sequence[Part]) -> list[Link]:
    """The source model as links that fit into the host's memory."""
    limit = segment_limit(options.host_memory)
    made = _in_floats(work, parts)
    whole = [Part(p.path, wholes(p.inputs, work.pieces), wholes(p.outputs, work.pieces)) for p in made]
    chain = source_chain(work.forms, limit, runtime, work.source_bytes, work.half, whole)
    chain += cutting_links([name for part in made for name in part.outputs], work.pieces)
    return [_bounded(options.host_memory, link) for link in chain]


def _verified_batch(
    writer: BundleWriter, options: Options, runtime: Backend, work: _Work, parts: Sequence[Part]
) -> str | None:
    """The batch of the contract: rows together have been compared with rows apart, on random values.

    Raises OptionError where they differ, if a person named it.
    """
    if work.batch is None:
        return None
    rows = 2 * max(work.dims[work.batch].min, 1)
    dims = work.dims | {work.batch: DimRange(rows, rows, rows)}
    try:
        for value in work.model.graph.outputs:
            if value.shape is None:
                raise VerificationError(f"the dimensions of output {value.name!r} are not known")
        sample = random_samples(work.model, Contract(work.inputs.inputs, (), dims), ("opt",))[0]
        with writer.scratch() as folder:
            cache = ActivationCache(folder, shutil.disk_usage(folder).free // 2)
            chain = _source_links(options, runtime, work, parts)
            verify_rows(chain, sample, work.results, cache, HALF_LIMIT if work.half else FLOAT_LIMIT)
    except (VerificationError, DataError) as error:
        if options.batch_axis:
            raise OptionError(
                f"--batch-axis: {work.batch!r} is not the batch: {error}", "leave the option out"
            ) from None
        return None
    return work.batch


def _bounded(nbytes: int, link: Link) -> Link:
    return dataclasses.replace(link, load=lambda: BoundedModel(link.load(), nbytes))


def _plan(
    board: Board,
    options: Options,
    runtime: Backend,
    work: _Work,
    parts: Sequence[Part],
    weights: list[WeightFootprint],
    batch: str | None,
) -> tuple[Contract, memory.Residencies, MemoryPlan]:
    """Observe one run at the largest shapes, and make contract, residency and certificate of what was seen."""
    largest, trace = _observed(runtime, work, parts)
    contract = build_contract(work.model, work.dims, trace.output_nbytes, batch)
    arena = place(memory.activation_buffers(trace))
    practical = memory.arena_in_practice(
        arena.height,
        trace.peak,
        lambda size: runtime.runs_within(parts, work.settings, largest, size, trace),
        budget_bytes(board),
    )
    inputs = sum(spec.max_nbytes for spec in contract.inputs)
    slot = inputs + sum(spec.max_nbytes for spec in contract.outputs)
    images = (memory_bytes(options.recipe, contract), options.recipe.decode.max_bytes) if options.recipe else ()
    crossing = memory.crossing_bytes(trace.made, [part.inputs for part in parts])
    needs = memory.Footprint(weights, practical - arena.height, slot, inputs, *images, crossing=crossing)
    return contract, *memory.choose(board, arena, needs, options.slots, options.residency, work.scheme_is_blocked)


def _observed(runtime: Backend, work: _Work, parts: Sequence[Part]) -> tuple[Sample, Trace]:
    """A run on random values, which make data-dependent results large; where the model cannot run on such values (it
    divides by them, they are axes), on a sample of the largest shapes."""
    random = largest_sample(work.model, work.inputs, work.samples)
    try:
        return random, runtime.observe(parts, work.settings, random, work.results)
    except VerificationError:
        for sample in work.samples:
            if all(sample[name].shape == array.shape for name, array in random.items()):
                return sample, runtime.observe(parts, work.settings, sample, work.results)
        raise


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


def _cut(
    model: ir.Model,
    forms: SourceForms,
    board: Board,
    options: Options,
    runtime: Backend,
    inputs: Contract,
    blocked: bool,
    codes: Mapping[str, Codes],
    pieces: Mapping[str, Piece],
) -> tuple[list[Cut], Cuts | None]:
    """Segments small enough that the host can load one at a time, and the board hold two where it streams them."""
    limit, largest = segment_limit(options.host_memory), sizes_at(inputs.dims, "max")
    total = sum(tensor.nbytes for tensor in initializers(model))
    nbytes = {v.name or "": largest_nbytes(v, largest) or 0 for node in model.graph for v in node.outputs}
    taken = sum(spec.max_nbytes for spec in inputs.inputs)
    slot = taken + sum(nbytes.get(value.name or "", 0) for value in model.graph.outputs)
    images = (memory_bytes(options.recipe, inputs), options.recipe.decode.max_bytes) if options.recipe else ()
    active = peak_bytes(order_of(model, {}, nbytes, [0] * len(model.graph)))
    arena = Arena(active, active, 1, ())
    at_cuts = [position.crossing or 0 for position in positions(model, nbytes)]

    def judge(ends: Sequence[int]) -> Outcome:
        weights = [runtime.weight_footprint(model, largest, *part) for part in itertools.pairwise((0, *ends))]
        crossing = max((at_cuts[end - 1] for end in ends[:-1]), default=0)
        needs = memory.Footprint(weights, 0, slot, taken, *images, crossing=crossing)
        return Outcome.of(memory.choose(board, arena, needs, options.slots, options.residency, blocked)[1])

    whole = [len(model.graph)]
    if total <= limit and not options.wishes.recorded() and not judge(whole).excess:
        return segments(model, whole), None
    crossing = {name: size for name, size in forms.sizes.items() if name in forms.made}
    crossing |= {name: nbytes[name] for name in codes if codes[name].source in crossing and name in nbytes}
    crossing |= {
        name: -(-crossing[piece.whole] * (piece.stop - piece.start) // piece.size)
        for name, piece in pieces.items()
        if piece.whole in crossing
    }
    chosen = choose_cuts(model, crossing, nbytes, options.wishes, limit, board, judge)
    return segments(model, chosen.ends), chosen


def _write_segments(
    writer: BundleWriter, work: _Work, runtime: Backend, host_memory: int, digests: Digests, progress: Progress
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


def _check_disk(writer: BundleWriter, planned: int) -> None:
    """Refuse before any work what the disk cannot hold; what an interrupted run left there counts as room."""
    left = sum(p.stat().st_size for p in writer.folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(writer.folder).free + left
    needed = planned + planned // 50 + MIB
    if free < needed:
        where = writer.out.absolute().parent
        raise OptionError(f"the bundle needs {human(needed)}; {where} has {human(free)} free", "make room")


def _model_name(text: str) -> str:
    """A file name as a model name: what stands in URLs and topics has a narrow alphabet."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text).lstrip("._-")[:100]
    if not NAME.fullmatch(name):
        raise OptionError(f"no model name can be made of {text!r}", "give one with --name")
    return name


def _check_opset(model: ir.Model, board: Board) -> None:
    opset = model.graph.opset_imports.get("", 1)
    if opset > board.runtime.max_opset:
        raise ModelError(
            f"the model uses opset {opset}; {board.runtime.name} {board.runtime.version} on {board.name} "
            f"ends at {board.runtime.max_opset}",
            f"export it with opset_version={board.runtime.max_opset} or lower",
        )


def _check_recipe(model: ir.Model, dims: dict[str, DimRange], options: Options) -> None:
    """Whether the recipe goes with the model, and its labels with the classes, before any work is done."""
    if options.recipe is None:
        return
    contract = build_contract(model, dims, {value.name or "": 0 for value in model.graph.outputs})
    check_input(options.recipe, contract)
    check_outputs(options.recipe, contract)
    carried = {f"assets/{path.name}": path for path in options.assets}

    def read(name: str) -> bytes:
        if name == METADATA:
            return _properties_json(dict(model.metadata_props))
        if name not in carried:
            raise OptionError(f"the recipe reads {name}", f"give the file with --asset .../{Path(name).name}")
        return carried[name].read_bytes()

    read_labels(options.recipe, contract, read)


def _samples(model: ir.Model, contract: Contract, options: Options, progress: Progress) -> tuple[list[Sample], str]:
    if options.calib is not None:
        readers = readers_of(options.recipe)
        return read_samples(options.calib, contract, options.samples, progress.warn, readers), options.calib.name
    progress.warn("no --calib data: verified on random inputs, which say whether the model runs, not how well")
    if control := control_inputs(model):
        names = " and ".join(map(repr, control[:2])) + (f" and {len(control) - 2} more" if control[2:] else "")
        progress.warn(f"the values of {names} decide shapes, and random ones mean nothing: give samples with --calib")
    return random_samples(model, contract, corners(contract.dims)), "random"


def _strip_metadata(model: ir.Model) -> None:
    """Documentation strings and the exporter's name say nothing that the runtime needs."""
    model.metadata_props.clear()
    model.doc_string = ""
    model.producer_name, model.producer_version = "tightfit", ""


def _write_properties(writer: BundleWriter, properties: dict[str, str]) -> None:
    """The model's own metadata (labels, alphabets) become an asset."""
    if properties:
        writer.add(METADATA, _properties_json(properties))


def _properties_json(properties: dict[str, str]) -> bytes:
    return json.dumps(dict(sorted(properties.items())), ensure_ascii=False, indent=1).encode()


def _error_limit(options: Options, scheme: Scheme, half: bool) -> float | None:
    quantizes = scheme.matmul_bits or scheme.conv_bits or scheme.dynamic or scheme.static
    if options.max_error is not None or quantizes:
        return options.max_error
    return HALF_LIMIT if half else FLOAT_LIMIT


def _segment(folder: Path, part: Part, settings: dict[str, str], residency: Residency) -> Segment:
    file = part.path.relative_to(folder).as_posix()
    own = {**settings, "session.disable_prepacking": "1"} if residency is Residency.UNPACKED else settings
    return Segment(file, part.inputs, part.outputs, own, residency)


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
