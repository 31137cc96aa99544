"""Everything that is done to a model before its weights are touched: read, passes, splits, ranges, lowering, cuts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from compile import memory
from compile.backends.base import Backend, Lowered
from compile.calibrate.collect import HashedSamples
from compile.calibrate.collectors import METHODS, Range, Unfit, collect_range, whole_range
from compile.calibrate.control import control_inputs
from compile.calibrate.run import calibrate
from compile.calibrate.samples import Sample, iterate, read_samples, readers_of
from compile.calibrate.synthetic import corners, random_samples
from compile.dump import dump_after
from compile.errors import ModelError, OptionError
from compile.forms import SIMPLIFY, SOURCE_FORM, SourceForms, link_limit
from compile.graph import initializers, ir, load_model, weight_nbytes
from compile.options import Options
from compile.padding import check_padding
from compile.partition.choose import Outcome, choose_cuts
from compile.partition.codes import Codes, codes_of
from compile.partition.cuts import Cuts
from compile.partition.graph import Cut, order_of, positions, segments, static_sizes
from compile.partition.tables import peak_bytes
from compile.passes.base import run_passes
from compile.passes.normalize import FixNames, RemoveDeadCode, SortNodes
from compile.passes.quantizers import QuantizeAtOnce
from compile.passes.split.choose import choose_splits
from compile.passes.split.columns import turned_whole
from compile.passes.split.pieces import Piece, pieces_of
from compile.passes.split.plan import Splits
from compile.passes.widen import holds_half
from compile.progress import Progress
from compile.quantize.schemes import SCHEMES, Scheme
from compile.quantize.source import check_scales
from compile.shapes import (
    bind,
    build_contract,
    contract_inputs,
    contract_outputs,
    find_batch,
    largest_nbytes,
    sizes_at,
)
from compile.sizes import check_inputs, check_sizes, largest_value, segment_limit
from compile.source import SourceStamp
from compile.states import find_states, pairs_of
from compile.text import check_tokenizer
from compile.verify import FLOAT_LIMIT, HALF_LIMIT
from compile.windows import check_split, longest_bytes
from targets.arena import Arena
from targets.board import Board, board_digest
from targets.bundle import NAME
from targets.recipe import METADATA, check_input, check_outputs, memory_bytes, read_labels
from targets.states import State
from targets.tensor import Contract, DimRange

# Random samples to calibrate on, for each corner of the dimension ranges.
RANDOM_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """The model after every change that needs no weights, and what is known of it. `head` is all that the bundle's
    bytes depend on; `scheme_is_blocked`: matrices are quantized in blocks; `notes`: what the passes had to say;
    `verified_with`: settings of the bundle's and of this machine. The batch of `inputs` is the dimension that may be
    it."""

    name: str
    model: ir.Model
    dims: dict[str, DimRange]
    inputs: Contract
    states: tuple[State, ...]
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
    verified_with: dict[str, str]
    properties: dict[str, str]
    source_bytes: int
    half: bool
    stamp: SourceStamp
    forms: SourceForms
    head: dict[str, Any]
    error_limit: float | None
    scheme_is_blocked: bool

    @property
    def planned_bytes(self) -> int:
        """Bytes of all weights as they will be written; a weight that is stored once may count twice."""
        return sum(tensor.nbytes for tensor in initializers(self.model))

    @property
    def results(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.outputs]


def transform(
    source: Path, out: Path, board: Board, options: Options, runtime: Backend, scheme: Scheme, progress: Progress
) -> Work:
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
    dims, sums = bind(model, options.shapes)
    inputs = Contract(contract_inputs(model, dims), (), dims, sums=sums or UNSET)
    states, lacking = _states(model, inputs, options)
    if states and options.batch_axis:
        raise OptionError("--batch-axis: requests with state do not run together", "leave the option out")
    if not states:
        inputs = msgspec.structs.replace(inputs, batch=find_batch(inputs, options.batch_axis))
    if options.pad:
        check_padding(inputs, options.pad)
    if options.split is not None:
        check_split(inputs, options.split)
        if options.recipe is not None:
            raise OptionError("--split: an image is no sequence", "leave out --split or --recipe")
    check_inputs(inputs, board, options.host_memory)
    dump = dump_after(options.dump_after, model, options.dump_to or out.absolute().parent, out.stem)
    notes = [*lacking, *run_passes(model, SOURCE_FORM, dump)]
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
    _check_tokenizer(model, inputs, states, options)
    samples, sample_origin = _samples(model, inputs, options, progress)
    ranges, found, calibration = _calibrate(model, inputs, forms, out, options, runtime, scheme, progress)
    notes += found
    lowered = runtime.lower(model, scheme, ranges)
    codes, pieces = codes_of(model, forms.made), pieces_of(model, forms.made)
    run_passes(model, (RemoveDeadCode(), FixNames(), SortNodes(), QuantizeAtOnce()))
    properties = dict(model.metadata_props)
    _strip_metadata(model)
    recorded = options.recorded() | scheme.recorded() | calibration
    cuts, chosen = _cut(model, forms, board, options, runtime, inputs, states, bool(scheme.matmul_bits), codes, pieces)
    head = {"source": stamp.described(), "board": board_digest(board), "options": recorded, **tools(runtime)}
    return Work(
        name=name,
        model=model,
        dims=dims,
        inputs=inputs,
        states=states,
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
        verified_with=runtime.session_settings(scheme) | runtime.verification_settings(scheme),
        properties=properties,
        source_bytes=source_bytes,
        half=half,
        stamp=stamp,
        forms=forms,
        head=head,
        error_limit=_error_limit(options, scheme, half),
        scheme_is_blocked=bool(scheme.matmul_bits),
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
    bodies = longest_bytes(inputs, options.split)
    slots = options.slots or memory.LEAST_SLOTS
    others = memory.beside_model(board, slots, taken + given, bodies, memory.batch_bytes(inputs))
    if options.recipe:
        others += memory_bytes(options.recipe, inputs)
    if options.tokenizer:
        others += options.tokenizer.memory_bytes

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
    """Ranges of the activations that the scheme needs; what a person should know of them; what identifies them."""
    if not scheme.calibrated:
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
    choose = whole_range if scheme.half else functools.partial(collect_range, method=METHODS[method])
    ranges = calibrate(model, names, hashed, choose, runtime, forms.path.parent, forms.sizes, limit, scratch)
    notes = [f"{name!r} stays float: {found.reason}" for name, found in ranges.items() if isinstance(found, Unfit)]
    if calib is None:
        notes.append("calibrated on random values: the ranges are guesses, and accuracy on real data is unknown")
    for note in notes:
        progress.warn(note)
    return ranges, notes, {"calibrate_with": method, "calibrated_on": hashed.sha256}


def _cut(
    model: ir.Model,
    forms: SourceForms,
    board: Board,
    options: Options,
    runtime: Backend,
    inputs: Contract,
    states: Sequence[State],
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
    # Both places of a pair of state are as large as the larger, which is what a run leaves.
    slot += sum(max(nbytes.get(each.output, 0) - inputs.input(each.input).max_nbytes, 0) for each in states)
    images = (memory_bytes(options.recipe, inputs), options.recipe.decode.max_bytes) if options.recipe else ()
    active = peak_bytes(order_of(model, {}, nbytes, [0] * len(model.graph)))
    arena = Arena(active, active, 1, ())
    at_cuts = [position.crossing or 0 for position in positions(model, nbytes)]

    def judge(ends: Sequence[int]) -> Outcome:
        weights = [runtime.weight_footprint(model, largest, *part) for part in itertools.pairwise((0, *ends))]
        crossing = max((at_cuts[end - 1] for end in ends[:-1]), default=0)
        bodies = longest_bytes(inputs, options.split)
        needs = memory.Footprint(
            weights, 0, slot, bodies, *images,
            crossing=crossing,
            batch=memory.batch_bytes(inputs),
            tokenizer=options.tokenizer.memory_bytes if options.tokenizer else 0,
        )  # fmt: skip
        slots = options.slots or memory.LEAST_SLOTS
        return Outcome.of(memory.choose(board, arena, needs, slots, options.residency, blocked)[1])

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
            return properties_json(dict(model.metadata_props))
        if name not in carried:
            raise OptionError(f"the recipe reads {name}", f"give the file with --asset .../{Path(name).name}")
        return carried[name].read_bytes()

    read_labels(options.recipe, contract, read)


def _states(model: ir.Model, inputs: Contract, options: Options) -> tuple[tuple[State, ...], list[str]]:
    """What one run leaves to the next, and what looks like it and is not."""
    if options.split is not None:
        return (), []
    pairs = pairs_of(model, options.states)
    # An output whose type is not known yet is none that an exporter of caches made.
    if any(value.dtype is None for value in model.graph.outputs) or not pairs:
        return (), []
    outputs = contract_outputs(model, inputs.dims, {value.name or "": 0 for value in model.graph.outputs})
    return find_states(pairs, inputs.inputs, outputs, inputs.dims, options.states)


def _check_tokenizer(model: ir.Model, inputs: Contract, states: Sequence[State], options: Options) -> None:
    """Whether the model generates text, and the tokenizer is its own, before any work is done."""
    if options.tokenizer is not None:
        nothing = {value.name or "": 0 for value in model.graph.outputs}
        contract = build_contract(model, inputs.dims, nothing, states=states, sums=inputs.sums or ())
        check_tokenizer(options.tokenizer, contract)


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


def _error_limit(options: Options, scheme: Scheme, half: bool) -> float | None:
    quantizes = scheme.matmul_bits or scheme.conv_bits or scheme.dynamic or scheme.static
    if options.max_error is not None or quantizes:
        return options.max_error
    return HALF_LIMIT if half or scheme.half else FLOAT_LIMIT


def _model_name(text: str) -> str:
    """A file name as a model name: what stands in URLs and topics has a narrow alphabet."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text).lstrip("._-")[:100]
    if not NAME.fullmatch(name):
        raise OptionError(f"no model name can be made of {text!r}", "give one with --name")
    return name


def tools(runtime: Backend) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("onnx", "onnx-ir", "onnxscript", "numpy")}
    return {"tightfit": metadata.version("tightfit"), "onnxruntime": runtime.version(), **versions}


def properties_json(properties: dict[str, str]) -> bytes:
    """The model's own metadata, as the asset that a bundle carries."""
    return json.dumps(dict(sorted(properties.items())), ensure_ascii=False, indent=1).encode()
