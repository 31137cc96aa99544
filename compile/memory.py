"""Where each activation stands, and what every phase of the bundle's life needs. Pure: values in, values out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from compile.backends.base import Step, Trace, WeightFootprint
from compile.packing.place import ALIGNMENT
from targets.arena import Arena, Buffer
from targets.board import MIB, Board
from targets.budget import (
    ANSWERS,
    BATCH,
    FINALISE,
    RING,
    TOKENIZER,
    WAITING,
    MemoryPlan,
    Phase,
    Sweep,
    Term,
    budget_bytes,
)
from targets.bundle import Residency
from targets.errors import BudgetError
from targets.tensor import Contract, human


@dataclasses.dataclass
class _Live:
    """A buffer while the trace is followed: a value may hand it on to a later one."""

    name: str
    nbytes: int
    lower: int
    upper: int


def activation_buffers(trace: Trace) -> tuple[Buffer, ...]:
    """One buffer per allocation of the observed run, alive from its kernel to the last that reads it.

    A kernel that allocated less than it wrote worked in place, or renamed its input (Reshape): then the output
    lives on in the input's buffer; or it got a buffer of its size that was done with, which the runtime then holds
    from its first use to its last. Graph outputs live to the end of the run.
    """
    last_use = _last_uses(trace.steps)
    end = len(trace.steps)
    buffers: list[_Live] = []
    holder: dict[str, _Live] = {}
    for at, step in enumerate(trace.steps):
        spare = step.allocated
        for name, nbytes in _outputs(step):
            until = end if name in trace.output_nbytes else max(last_use.get(name, at), at) + 1
            if step.in_subgraph:
                until = max(until, _enclosing_end(trace.steps, at))
            source = None if spare >= nbytes else _reused(step, holder, buffers, nbytes, at)
            if source is None and (spare < nbytes and _comes_from_outside(step, holder)):
                continue
            if source is None:
                source = _Live(name or f"{step.name}:{at}", _aligned(nbytes), at, until)
                buffers.append(source)
                spare -= nbytes
            source.upper = max(source.upper, until)
            if name:
                holder[name] = source
    return tuple(Buffer(b.name, b.lower, b.upper, b.nbytes) for b in buffers if b.nbytes)


def _outputs(step: Step) -> Iterable[tuple[str, int]]:
    names = (*step.outputs, *[""] * (len(step.output_nbytes) - len(step.outputs)))
    return zip(names, step.output_nbytes, strict=False)


def _last_uses(steps: Sequence[Step]) -> dict[str, int]:
    return {name: at for at, step in enumerate(steps) for name in step.inputs}


def _enclosing_end(steps: Sequence[Step], at: int) -> int:
    """Kernels of a body end before the control-flow node around them does."""
    return next((later for later in range(at, len(steps)) if not steps[later].in_subgraph), len(steps) - 1) + 1


_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")


def _reused(step: Step, holder: dict[str, _Live], buffers: Sequence[_Live], nbytes: int, at: int) -> _Live | None:
    """The buffer that the output took: an input's of its size that nobody reads later; one of its size that was done
    with; else an input's that is large enough."""
    held = [holder[name] for name in step.inputs if name in holder and holder[name].nbytes >= nbytes]
    if step.op not in _VIEWS and not any(b.nbytes == _aligned(nbytes) and b.upper <= at + 1 for b in held):
        done = next((b for b in reversed(buffers) if b.upper <= at and b.nbytes == _aligned(nbytes)), None)
        if done is not None:
            return done
    return min(held, key=lambda b: (b.upper > at + 1, b.nbytes), default=None)


def _comes_from_outside(step: Step, holder: dict[str, _Live]) -> bool:
    """Whether the output can only be a view of a graph input or a weight, which the arena does not hold."""
    return not any(name in holder for name in step.inputs)


# malloc has large blocks mapped, each on pages of its own.
_BLOCK_HEADER_BYTES, _PAGE_BYTES = 16, 4096


def crossing_bytes(made: Sequence[Mapping[str, int]], read: Sequence[Collection[str]]) -> int:
    """The most that crosses a cut between two segments, in blocks of the heap. `made`: bytes of what each makes, by
    name; `read`: what each reads. Results that no later segment reads do not cross: they stand in the slot by then."""
    last = {name: at for at, names in enumerate(read) for name in names}
    at_cut = [0] * len(made)
    for at, each in enumerate(made):
        for name, nbytes in each.items():
            for cut in range(at, last.get(name, at)):
                at_cut[cut] += -(-(nbytes + _BLOCK_HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
    return max(at_cut, default=0)


# Below this, a closer search for the arena costs more runs than it saves memory.
SEARCH_STEP_BYTES = 1 << 16


def arena_in_practice(planned: int, observed: int, fits: Callable[[int], bool], limit: int) -> int:
    """An arena in which the runtime's own online allocator completes a run, at most 5 % (or 64 KiB) above the
    smallest; the difference to the plan is the runtime's scratch and fragmentation.

    Lies between the plan's height and the peak that the arena itself reported, where that is higher: kernels also ask
    for scratch, and an arena that grows hands out chunks that are larger than what was asked for. Where that is not
    enough, doubles what it adds until a run fits; then halves the gap. Raises BudgetError when no run fits within
    `limit` bytes.
    """
    low, high = _aligned(max(planned, ALIGNMENT)), _aligned(max(planned, observed, ALIGNMENT))
    if low < high and fits(low):
        return low
    if not fits(high):
        low, high = _doubling(high, fits, limit, planned)
    while high - low > max(low // 20, SEARCH_STEP_BYTES):
        middle = _aligned((low + high) // 2)
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _doubling(high: int, fits: Callable[[int], bool], limit: int, planned: int) -> tuple[int, int]:
    """(an arena that is too small, one that is enough)."""
    extra = max(high // 20, SEARCH_STEP_BYTES)
    while True:
        low, high = high, _aligned(min(high + extra, limit))
        if high <= low:
            raise BudgetError(
                f"no arena of up to {human(limit)} lets the model run; its activations alone need {human(planned)}",
                "use smaller shapes, or choose a larger board",
            )
        if fits(high):
            return low, high
        extra *= 2


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


INDEX_BYTES = 8
"""For each `ALIGNMENT` bytes, what onnxruntime's arena keeps to find the chunk of an address (AllocationRegion)."""

SERVICE_BYTES = 768 << 10
"""What a model has both processes hold beside all that is counted, whatever it is: found by measuring thirteen bundles,
of which it had up to 0.6 MiB; probably partly filled pages of two heaps, and objects of contract and requests."""

SESSION_BYTES, THREAD_BYTES = 16 << 10, 112 << 10
"""What each further session has of its own, and each of its threads: they have a pool of threads each, whose stacks are
touched. Five sessions of two threads had 880 KiB more than one; 55 KiB a thread before the first run."""

BODY_COPIES = 2
"""A request's tensors in the gateway, in the binary form: the parts that arrived, and the body joined from them. JSON
is several times as long, compressed bodies are held twice; neither is in the plan."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one bundle needs beside its arena: weights of every segment, the runtime's scratch, one request slot, and
    that slot's inputs alone; with a recipe, what images take: decoded in the gateway, and encoded as they arrive. Of
    values that cross from one segment to another, the most that one request holds at a cut. Inputs of requests that are
    put together, where they can be. Where long sequences are split, `inputs` and `answers` are those of the longest.
    `tokenizer`: what it takes in the gateway."""

    weights: Sequence[WeightFootprint]
    workspace: int
    slot: int
    inputs: int
    images: int = 0
    encoded: int = 0
    _: dataclasses.KW_ONLY
    crossing: int = 0
    batch: int = 0
    answers: int = 0
    tokenizer: int = 0


# What is tried, in order, when nobody chose: fastest first. Block-quantized kernels need their own layout of the
# weights, without it they are 60 times as slow; for float weights mapping the bundle's own file costs no second one.
# What fits in none of them is streamed, as little of it as can be.
PREFERENCE = {
    True: (Residency.HEAP, Residency.MAPPED),
    False: (Residency.HEAP, Residency.UNPACKED),
}


# Above this share of the budget the heap is tight: mapped weights are as fast while they stay in memory, and can be
# evicted when something else needs it.
ROOMY = 2 / 3


# Requests that can be in memory at once, where nobody chose: with more of them there are larger batches, and fewer who
# wait at the door; past these there is nothing to win on so small a board.
LEAST_SLOTS, MOST_SLOTS = 2, 32
SLOTS_SHARE = 0.03
"""Of the budget, what more slots than the least may take: with their bodies, and with what waits at cuts."""


Residencies = tuple[Residency, ...]
"""Of every segment, in their order. They are alike, or some are streamed and the others mapped."""


def choose(
    board: Board, arena: Arena, needs: Footprint, slots: int | None, requested: Residency | None, quantized: bool
) -> tuple[Residencies, MemoryPlan]:
    """Residencies, and their plan with so many slots; without a number as many as are a small matter to the board.

    More than the least number of slots never change where weights are.
    """
    residencies, chosen = _reside(board, arena, needs, slots or LEAST_SLOTS, requested, quantized)
    if slots is None:
        share = ROOMY if residencies[0] is Residency.HEAP and not requested else 1
        for more in range(MOST_SLOTS, LEAST_SLOTS, -1):
            made = plan(board, arena, needs, more, residencies)
            if _requests_bytes(made) <= SLOTS_SHARE * made.budget_bytes and _fits(made, share):
                return residencies, made
    return residencies, chosen


def _requests_bytes(made: MemoryPlan) -> int:
    """What requests take that are in memory, but for the one that runs."""
    return sum(made.phase("run").nbytes(name) for name in ("io_slots", "bodies", BATCH, WAITING, ANSWERS))


def _reside(
    board: Board, arena: Arena, needs: Footprint, slots: int, requested: Residency | None, quantized: bool
) -> tuple[Residencies, MemoryPlan]:
    """The first residencies whose plan stays inside the board's budget, or the requested one for all; and their plan.

    Of several, one that would fill more than `ROOMY` of the budget with memory that cannot be evicted is passed over.
    When none fits, the last one's plan is returned: `check_plan` then says what is too large.
    """
    count = len(needs.weights)
    if requested:
        residencies = (requested,) * count
        return residencies, plan(board, arena, needs, slots, residencies)
    for each in PREFERENCE[quantized]:
        made = plan(board, arena, needs, slots, (each,) * count)
        if _fits(made, ROOMY if each is Residency.HEAP else 1):
            return (each,) * count, made
    best = (Residency.STREAMED,) * count
    made = plan(board, arena, needs, slots, best)
    for number in range(2, count):
        spread = [(r, plan(board, arena, needs, slots, r)) for r in _spreads(count, number)]
        fitting = [(r, p) for r, p in spread if _fits(p, 1)]
        if fitting:
            return min(fitting, key=lambda each: each[1].sweep.pass_bytes if each[1].sweep else 0)
    return best, made


def _fits(made: MemoryPlan, share: float) -> bool:
    return all(phase.total_bytes <= share * made.budget_bytes for phase in made.phases)


def _spreads(count: int, streamed: int) -> Iterator[Residencies]:
    """So many streamed segments of `count`, as far from each other as can be, so that one is read while others run."""
    places = [at * count // streamed for at in range(streamed)]
    for shift in range(-(-count // streamed)):
        chosen = {(place + shift) % count for place in places}
        yield tuple(Residency.STREAMED if step in chosen else Residency.MAPPED for step in range(count))


def batch_bytes(contract: Contract) -> int:
    """Inputs of the largest batch, which stands beside the slots that it was put together from; 0 where none is."""
    return sum(spec.max_nbytes for spec in contract.inputs) if contract.batch_rows else 0


def beside_model(board: Board, slots: int, slot: int, inputs: int, batch: int) -> int:
    """What a running bundle takes that is neither weights nor activations (bytes), but for sessions and images."""
    requests = slots * (slot + BODY_COPIES * inputs) + (batch if slots > 1 else 0)
    return board.memory.runtime_fixed_mib * MIB + SERVICE_BYTES + requests


def plan(board: Board, arena: Arena, needs: Footprint, slots: int, residencies: Residencies) -> MemoryPlan:
    """The certificate.

    finalise: one segment at a time is mapped, laid out on the heap, and written. Only where files are made so.
    load:     weights one after the other; while one is laid out, its source is mapped beside the copy.
    run:      what stays of that, the arena, each slot in the slab that both processes share, and the bodies that the
              gateway reads, as they arrived and joined. Answers leave straight from the slab. With a recipe also the
              image library and the one image that is being decoded. Where requests can be put together, a copy of
              their inputs; what comes of them is no more than one request of the largest shape makes. Where long
              sequences are split, their bodies, and what their windows are put together to. Where segments are
              streamed all requests go through them together; what each holds between two of them waits outside the
              arena.
    """
    per_session = SESSION_BYTES + board.cores * THREAD_BYTES
    fixed = (
        Term("runtime", "anonymous", board.memory.runtime_fixed_mib * MIB),
        Term("service", "anonymous", SERVICE_BYTES + (len(needs.weights) - 1) * per_session),
        *([Term(TOKENIZER, "anonymous", needs.tokenizer)] if needs.tokenizer else []),
    )
    streams = Residency.STREAMED in residencies
    waiting = slots * needs.crossing if slots > 1 else 0
    index = -(-(arena.height + needs.workspace) // ALIGNMENT) * INDEX_BYTES
    weights = _weight_terms(needs.weights, residencies, index)
    phases = [
        Phase("load", (*fixed, *weights.load)),
        Phase(
            "run",
            (
                *fixed,
                *weights.run,
                Term("activations", "anonymous", arena.height),
                Term("workspace", "anonymous", needs.workspace),
                *([Term(WAITING, "anonymous", waiting)] if streams else []),
                *([Term(BATCH, "anonymous", needs.batch)] if needs.batch and slots > 1 else []),
                Term("arena_index", "anonymous", index),
                Term("io_slots", "shared", slots * needs.slot),
                Term("bodies", "anonymous", slots * max(needs.inputs, needs.encoded) * BODY_COPIES),
                *([Term(ANSWERS, "anonymous", slots * needs.answers)] if needs.answers else []),
                *([Term("recipe", "anonymous", needs.images)] if needs.images else []),
            ),
        ),
    ]
    if residencies[0].needs_finalise:
        phases.insert(0, Phase(FINALISE, (*fixed, *_finalise_terms(needs.weights, index))))
    budget = budget_bytes(board)
    taken = phases[-1].total_bytes - sum(t.nbytes for t in weights.run if t.name in ("mapped_weights", RING))
    sweep = _sweep(needs.weights, residencies, budget - taken) if streams else None
    return MemoryPlan(budget, slots, tuple(phases), arena, sweep)


def _sweep(parts: Sequence[WeightFootprint], residencies: Residencies, room: int) -> Sweep:
    """What a pass brings in, beside what it would with `room` bytes of cache that kept what was used last, or what is
    needed next: of pages that are read in a circle that never has one left (Belady, 1966), and this keeps a part."""
    streamed = tuple(step for step, each in enumerate(residencies) if each is Residency.STREAMED)
    sizes = tuple(_swept(part) for part in parts)
    whole = sum(sizes)
    return Sweep(
        streamed=streamed,
        segment_bytes=sizes,
        pass_bytes=sum(sum(place) for place in _places([sizes[step] for step in streamed]) if len(place) > 1),
        lru_bytes=whole if whole > room else 0,
        belady_bytes=max(whole - room, 0),
    )


def _places(circle: Sequence[int]) -> list[Sequence[int]]:
    """The segments that have the one place in memory by turns, and those that have the other. Who has one for itself
    is read once."""
    return [circle[0::2], circle[1::2]]


def _swept(part: WeightFootprint) -> int:
    """Bytes that a run reads of a laid-out segment, but for rows of tables."""
    return part.copies + part.mapped - part.unread - part.tables


@dataclasses.dataclass(frozen=True)
class _WeightTerms:
    """What weights and sessions take while they are loaded, and afterwards."""

    load: tuple[Term, ...]
    run: tuple[Term, ...]


def _terms(session: int, heap: int, mapped: int) -> tuple[Term, ...]:
    return (
        Term("session", "anonymous", session),
        Term("weights", "anonymous", heap),
        Term("mapped_weights", "file", mapped),
    )


def _sum(parts: Sequence[WeightFootprint], kind: str) -> int:
    return sum(getattr(part, kind) for part in parts)


def _loading(part: WeightFootprint, index: int) -> tuple[int, int]:
    """(anonymous, file) bytes beside what stays, at the worst moment of loading one segment.

    Its weights are let go one at a time while copies are made; where the optimizer takes more, nothing is mapped.
    """
    copying = part.transit_heap + (index if part.indexes else 0)
    optimizing = part.optimizing - (part.heap - part.rearranged)
    return (copying, part.transit_file) if copying + part.transit_file > optimizing else (optimizing, 0)


def _heap_terms(parts: Sequence[WeightFootprint], index: int) -> _WeightTerms:
    session, heap = _sum(parts, "session"), _sum(parts, "heap")
    in_transit, source = max((_loading(part, index) for part in parts), key=sum)
    return _WeightTerms(
        _terms(session, heap + in_transit, _sum(parts, "touched") + source),
        _terms(session, heap, _sum(parts, "mapped")),
    )


def _mapped_terms(parts: Sequence[WeightFootprint], index: int) -> _WeightTerms:
    """Loading lays each weight out once more, and compares it with the file."""
    session, copies = _sum(parts, "session"), _sum(parts, "copies")
    compared, source = max(((part.largest + part.transit_heap, part.transit_file) for part in parts), key=sum)
    index = index if any(part.indexes for part in parts) else 0
    return _WeightTerms(
        _terms(session, compared + index, copies + _sum(parts, "touched") + source),
        _terms(session, 0, _in_memory(parts) + _sum(parts, "tables") - _sum(parts, "rows")),
    )


def _in_memory(parts: Sequence[WeightFootprint]) -> int:
    """Of laid-out segments, what one run reads. Run after run reads other rows of tables, in the end all of them."""
    return sum(_swept(part) + part.rows for part in parts)


def _unpacked_terms(parts: Sequence[WeightFootprint], _index: int) -> _WeightTerms:
    """The optimizer lays out what it does in any case; kernels read the rest where it is, once they run."""
    session, heap = _sum(parts, "session"), _sum(parts, "rearranged")
    in_transit = max(part.optimizing for part in parts)
    return _WeightTerms(
        _terms(session, heap + in_transit, 0),
        (
            *_terms(session, heap, _sum(parts, "sources") + _sum(parts, "mapped")),
            Term("scratch", "anonymous", max(part.unpacked_scratch for part in parts)),
        ),
    )


def _streamed_terms(parts: Sequence[WeightFootprint], residencies: Residencies, index: int) -> _WeightTerms:
    """What is mapped stays; what is streamed has two places by turns. Tables are read by rows from their files, while
    their segment runs.

    Loading leaves no pages behind.
    """
    staying = [part for part, each in zip(parts, residencies, strict=True) if each is not Residency.STREAMED]
    passing = [part for part, each in zip(parts, residencies, strict=True) if each is Residency.STREAMED]
    ring = sum(max(place, default=0) for place in _places([_swept(part) for part in passing]))
    rows = max(part.rows for part in passing)
    session = _sum(parts, "session")
    one_by_one = [_mapped_terms([part], index).load for part in parts]
    load = max(one_by_one, key=lambda terms: sum(term.nbytes for term in terms))
    return _WeightTerms(
        (Term("session", "anonymous", session), *load[1:]),
        (*_terms(session, 0, _in_memory(staying) + rows), Term(RING, "shared", ring)),
    )


def _finalise_terms(parts: Sequence[WeightFootprint], index: int) -> tuple[Term, ...]:
    """Each segment is loaded as on the heap, written, and loaded as the engine will."""
    moments = [
        terms
        for part in parts
        for terms in (_heap_terms([part], index).load, _writing(part), _mapped_terms([part], index).load)
    ]
    return max(moments, key=lambda terms: sum(term.nbytes for term in terms))


def _writing(part: WeightFootprint) -> tuple[Term, ...]:
    """All copies, and once more the largest of what is written, which is copied first. Weights that are written as they
    were seem to be read into memory too: with a table of 108 MiB that is also a matrix, 517 MiB were measured where the
    copies have 289."""
    return _terms(part.session + _being_made([part]), part.heap + part.largest + part.largest_mapped, 0)


def _being_made(parts: Sequence[WeightFootprint]) -> int:
    """While a session is made, its graph is there twice: as it was read, and as it was optimized. Measured with 1017
    nodes whose session keeps 5.6 MiB: 6.0 MiB more while it is finalised, 6.4 MiB while it is streamed."""
    return max(p.session for p in parts)


def _weight_terms(parts: Sequence[WeightFootprint], residencies: Residencies, index: int) -> _WeightTerms:
    if Residency.STREAMED in residencies:
        return _streamed_terms(parts, residencies, index)
    return _ALIKE[residencies[0]](parts, index)


_ALIKE: dict[Residency, Callable[[Sequence[WeightFootprint], int], _WeightTerms]] = {
    Residency.HEAP: _heap_terms,
    Residency.MAPPED: _mapped_terms,
    Residency.UNPACKED: _unpacked_terms,
}
