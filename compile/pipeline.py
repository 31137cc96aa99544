"""compile_model(): the one place that says what happens in which order."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from compile import memory
from compile.activations import ActivationCache
from compile.backends.base import Backend, Model, Part, Trace, WeightFootprint, backend
from compile.bounded import BoundedModel
from compile.calibrate.samples import Sample
from compile.calibrate.synthetic import largest_sample, random_samples, unmasked_sample
from compile.emit import segment_of, write_assets, write_properties, write_sample, write_segments
from compile.errors import DataError, OptionError, VerificationError
from compile.forms import source_chain
from compile.options import Options, check_options
from compile.packing.place import place
from compile.padding import verify_padding
from compile.page import page
from compile.partition.codes import InFloats, in_floats
from compile.passes.split.pieces import cutting_links, wholes
from compile.progress import Progress
from compile.quantize.schemes import choose_scheme
from compile.report import report_json, warnings
from compile.shapes import build_contract
from compile.sizes import segment_limit
from compile.transform import Work, tools, transform
from compile.verify import FLOAT_LIMIT, HALF_LIMIT, Link, verify, verify_rows
from compile.windows import measure_split, windows_notes
from compile.writer import BundleWriter
from targets.board import Board
from targets.budget import MemoryPlan, budget_bytes, check_plan
from targets.bundle import SCHEMA, Manifest, OutputError, Quantization, SegmentError, Verification, sealed
from targets.recipe import memory_bytes
from targets.tensor import Contract, DimRange, Padding
from targets.windows import Split


def compile_model(
    source: Path, board: Board, out: Path, options: Options, progress: Progress | None = None
) -> Manifest:
    """Compile an ONNX file for a board into the bundle `out`; returns its manifest.

    Raises a TightfitError that names what is wrong; then `out` is as it was before.
    """
    progress = progress or Progress()
    scheme = choose_scheme(options.scheme, board, options.block, options.symmetric)
    check_options(options)
    runtime = backend(board.runtime.name)
    work = transform(source, out, board, options, runtime, scheme, progress)
    with BundleWriter(out, work.head, options.overwrite) as writer, work.stamp.hashing() as digests:
        parts, weights, weight_bytes = write_segments(writer, work, runtime, options.host_memory, digests, progress)

        progress.phase("verify")
        errors, segment_errors = _verify(writer, options, runtime, work, parts)
        batch = _verified_batch(writer, options, runtime, work, parts)
        split = _measured_split(writer, options, runtime, work, parts)
        pad = _verified_padding(writer, options, runtime, work, parts, batch)
        for note in windows_notes(split, work.results):
            progress.warn(note)

        progress.phase("plan memory")
        contract, residencies, plan = _plan(board, options, runtime, work, parts, weights, batch, split, pad)
        check_plan(plan, budget_bytes(board))

        progress.phase("finish")
        quantized = work.lowered
        quantization = Quantization(scheme.name, quantized.quantized, quantized.left, work.source_bytes, weight_bytes)
        verification = Verification(
            work.sample_origin, len(work.samples), errors, segment_errors if len(parts) > 1 else ()
        )
        write_properties(writer, work.properties)
        sample = write_sample(writer, work.samples[0])
        assets = write_assets(writer, options.assets, options.tokenizer)
        segments = tuple(
            segment_of(writer.folder, part, work.settings, residency)
            for part, residency in zip(parts, residencies, strict=True)
        )
        said = [*work.notes, *warnings(verification), *windows_notes(split, work.results)]
        writer.add(
            "report.json",
            report_json(work.name, board.name, work.recorded, quantization, verification, plan, said, work.chosen),
        )
        writer.add(
            "report.html",
            page(
                work.name, board, work.recorded, contract, segments, quantization, verification, plan, said, work.chosen
            ),
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
                tools=tools(runtime),
                files=writer.files,
                recipe=options.recipe,
                generation=options.tokenizer.generation if options.tokenizer else UNSET,
            )
        )
        writer.commit(manifest)
    return manifest


def _verify(
    writer: BundleWriter, options: Options, runtime: Backend, work: Work, parts: Sequence[Part]
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


def _in_floats(work: Work, parts: Sequence[Part]) -> list[Part]:
    """The segments as they look from the source model, which has no codes."""
    return [Part(p.path, in_floats(p.inputs, work.codes), in_floats(p.outputs, work.codes)) for p in parts]


def _load_part(runtime: Backend, work: Work, part: Part) -> Model:
    model = runtime.load(part.path, work.verified_with)
    coded = work.codes.keys() & {*part.inputs, *part.outputs}
    return InFloats(model, part.inputs, work.codes) if coded else model


def _source_links(options: Options, runtime: Backend, work: Work, parts: Sequence[Part]) -> list[Link]:
    """The source model as links that fit into the host's memory."""
    limit = segment_limit(options.host_memory)
    made = _in_floats(work, parts)
    whole = [Part(p.path, wholes(p.inputs, work.pieces), wholes(p.outputs, work.pieces)) for p in made]
    chain = source_chain(work.forms, limit, runtime, work.source_bytes, work.half, whole)
    chain += cutting_links([name for part in made for name in part.outputs], work.pieces)
    return [_bounded(options.host_memory, link) for link in chain]


def _verified_batch(
    writer: BundleWriter, options: Options, runtime: Backend, work: Work, parts: Sequence[Part]
) -> str | None:
    """The batch of the contract: rows together have been compared with rows apart, on random values.

    Raises OptionError where they differ, if a person named it.
    """
    if work.inputs.batch is None:
        return None
    rows = 2 * max(work.dims[work.inputs.batch].min, 1)
    dims = work.dims | {work.inputs.batch: DimRange(rows, rows, rows)}
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
                f"--batch-axis: {work.inputs.batch!r} is not the batch: {error}", "leave the option out"
            ) from None
        return None
    return work.inputs.batch


def _verified_padding(
    writer: BundleWriter, options: Options, runtime: Backend, work: Work, parts: Sequence[Part], batch: str | None
) -> Padding | UnsetType:
    """What padding gives, where it makes no difference. Raises OptionError where it does."""
    if not options.pad:
        return UNSET
    if batch is None:
        raise OptionError("--pad: requests cannot run together: their rows are not computed apart", "leave --pad out")

    def sample_of(size: int) -> Sample:
        return unmasked_sample(work.model, work.inputs, {options.pad: size})

    limit = HALF_LIMIT if work.half else FLOAT_LIMIT
    with writer.scratch() as folder:
        cache = ActivationCache(folder, shutil.disk_usage(folder).free // 2)
        chain = _source_links(options, runtime, work, parts)
        return verify_padding(chain, work.inputs, options.pad, sample_of, work.results, cache, limit)


def _measured_split(
    writer: BundleWriter, options: Options, runtime: Backend, work: Work, parts: Sequence[Part]
) -> Split | UnsetType:
    """How windows of long sequences join. Raises OptionError where they do not, and VerificationError where what they
    give is further from the whole than `--max-error`."""
    if options.split is None:
        return UNSET
    wanted = options.split

    def sample_of(size: int) -> Sample:
        return unmasked_sample(work.model, work.inputs, {wanted.dim: size})

    with writer.scratch() as folder:
        cache = ActivationCache(folder, shutil.disk_usage(folder).free // 2)
        chain = _source_links(options, runtime, work, parts)
        split = measure_split(chain, work.inputs, wanted, sample_of, work.results, cache)
    for name, join in zip(work.results, split.joins, strict=True):
        if options.max_error is not None and (join.error or 0) > options.max_error:
            raise VerificationError(
                f"--split {wanted}: output {name!r} of windows differs from that of the whole: relative L2 "
                f"{join.error:.3g}, limit {options.max_error:.3g}",
                "let windows share more, or raise the limit with --max-error",
            )
    return split


def _bounded(nbytes: int, link: Link) -> Link:
    return dataclasses.replace(link, load=lambda: BoundedModel(link.load(), nbytes))


def _plan(
    board: Board,
    options: Options,
    runtime: Backend,
    work: Work,
    parts: Sequence[Part],
    weights: list[WeightFootprint],
    batch: str | None,
    split: Split | UnsetType,
    pad: Padding | UnsetType,
) -> tuple[Contract, memory.Residencies, MemoryPlan]:
    """Observe one run at the largest shapes, and make contract, residency and certificate of what was seen."""
    largest, trace = _observed(runtime, work, parts)
    sums = work.inputs.sums or ()
    contract = build_contract(work.model, work.dims, trace.output_nbytes, batch, split, pad, work.states, sums)
    arena = place(memory.activation_buffers(trace))
    practical = memory.arena_in_practice(
        arena.height,
        trace.peak,
        lambda size: runtime.runs_within(parts, work.settings, largest, size, trace),
        budget_bytes(board),
    )
    slot = sum(map(sum, contract.places))
    images = (memory_bytes(options.recipe, contract), options.recipe.decode.max_bytes) if options.recipe else ()
    crossing = memory.crossing_bytes(trace.made, [part.inputs for part in parts])
    together = memory.batch_bytes(contract)
    bodies = sum(spec.max_nbytes for spec in contract.whole.inputs)
    needs = memory.Footprint(
        weights,
        practical - arena.height,
        slot,
        bodies,
        *images,
        crossing=crossing,
        batch=together,
        answers=contract.answer_bytes,
        tokenizer=options.tokenizer.memory_bytes if options.tokenizer else 0,
    )
    return contract, *memory.choose(board, arena, needs, options.slots, options.residency, work.scheme_is_blocked)


def _observed(runtime: Backend, work: Work, parts: Sequence[Part]) -> tuple[Sample, Trace]:
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
