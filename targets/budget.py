"""What a board leaves for the model, and whether a plan stays inside it in every phase."""

from __future__ import annotations

import msgspec

from targets.arena import Arena, check_arena
from targets.board import MIB, Board
from targets.errors import BudgetError
from targets.tensor import human

KINDS = ("anonymous", "file", "shared")


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One summand of a phase. `kind` says how the kernel accounts for it: anonymous, file-backed or shared."""

    name: str
    kind: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"term {self.name!r}: kind must be one of {', '.join(KINDS)}")
        if self.nbytes < 0:
            raise ValueError(f"term {self.name!r}: bytes cannot be negative")


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is in memory at the worst moment of one phase of a bundle's life on the board."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total_bytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    def kind_bytes(self, kind: str) -> int:
        return sum(term.nbytes for term in self.terms if term.kind == kind)

    def term(self, name: str) -> Term | None:
        return next((term for term in self.terms if term.name == name), None)

    def nbytes(self, name: str) -> int:
        """Bytes of the term of that name; 0 where there is none."""
        return sum(term.nbytes for term in self.terms if term.name == name)


RING = "ring"
"""Term of the run phase where segments are streamed: the two places that their weights have by turns."""

WAITING = "waiting"
"""Term of the run phase where segments are streamed: what the requests of a pass hold from one segment to the next."""


BATCH = "batch"
"""Term of the run phase where requests can be put together: their inputs, one after the other, once."""


ANSWERS = "answers"
"""Term of the run phase where long sequences are split: what their windows are put together to."""


TOKENIZER = "tokenizer"
"""Term of loading and of running where text is generated: the tokenizer in the gateway."""


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pass over all segments brings in from storage, when not all weights stay in memory.

    `streamed` are positions of segments, in order; the others stay. `segment_bytes` is what a run reads of each.
    Streamed segments have two places in memory by turns; `pass_bytes` is what is read of those that share one.
    `lru_bytes` and `belady_bytes` are what a pass would bring in if the same memory were a page cache that keeps what
    was used last, or what will be used next (no policy reads less).
    """

    streamed: tuple[int, ...]
    segment_bytes: tuple[int, ...]
    pass_bytes: int
    lru_bytes: int
    belady_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The certificate: every phase, and where each activation stands in the arena.

    `budget_bytes` is M of the board it was compiled for; `slots` the requests that can be in memory at once.
    """

    budget_bytes: int
    slots: int
    phases: tuple[Phase, ...]
    arena: Arena
    sweep: Sweep | None = None

    def phase(self, name: str) -> Phase:
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise BudgetError(f"the plan has no phase {name!r}", "compile the bundle again")


PHASES = ("load", "run")
FINALISE = "finalise"
"""First phase of a plan whose weights are laid out anew on the board; others have none."""
NEEDED_TERMS = {
    FINALISE: ("runtime", "weights"),
    "load": ("runtime", "weights"),
    "run": ("runtime", "weights", "activations", "io_slots"),
}


def budget_bytes(board: Board) -> int:
    """M: what the service may use on this board. min(85 % of MemTotal, MemTotal - what the OS needs)."""
    total = board.memory.mem_total_mib * MIB
    return min(total * 85 // 100, total - board.memory.os_reserve_mib * MIB)


def budget_of_machine(mem_total_bytes: int, os_reserve_bytes: int) -> int:
    """M by the same rule for the machine the agent stands on."""
    return min(mem_total_bytes * 85 // 100, mem_total_bytes - os_reserve_bytes)


def check_plan(plan: MemoryPlan, budget: int) -> None:
    """Judge a certificate; trusts nothing but the terms. Raises BudgetError at the first that does not hold."""
    names = tuple(phase.name for phase in plan.phases)
    if names not in (PHASES, (FINALISE, *PHASES)):
        raise BudgetError(f"the plan has phases {', '.join(names) or 'none'}", f"needed: {', '.join(PHASES)}")
    for phase in plan.phases:
        missing = [name for name in NEEDED_TERMS[phase.name] if phase.term(name) is None]
        if missing:
            raise BudgetError(f"phase {phase.name}: the plan says nothing of {missing[0]!r}")
        if phase.total_bytes > budget:
            raise BudgetError(
                f"phase {phase.name} needs {human(phase.total_bytes)}, but the budget is {human(budget)}: "
                + ", ".join(f"{t.name} {human(t.nbytes)}" for t in phase.terms),
                "quantize further (--scheme int4), use smaller shapes, or choose a larger board",
            )
        counted = [term.name for term in phase.terms]
        if len(set(counted)) != len(counted):
            raise BudgetError(f"phase {phase.name}: the plan counts {max(counted, key=counted.count)!r} twice")
    _check_phases(plan)
    check_arena(plan.arena)
    activations = plan.phase("run").term("activations")
    if activations is None or activations.nbytes < plan.arena.height:
        raise BudgetError(f"the plan counts less for activations than its arena's {human(plan.arena.height)}")
    if plan.sweep is not None:
        _check_sweep(plan.sweep, plan.phase("run"), plan.budget_bytes)
        if plan.slots > 1 and len(plan.sweep.segment_bytes) > 1 and plan.phase("run").term(WAITING) is None:
            raise BudgetError(
                f"phase run: the plan says nothing of {WAITING!r}, though {plan.slots} requests share a pass",
                "compile the bundle again",
            )


def _check_phases(plan: MemoryPlan) -> None:
    """What is there whatever the model does is there in every phase, and what stays for the runs was loaded."""
    load, run = plan.phase("load"), plan.phase("run")
    for phase in plan.phases:
        for name in ("runtime", "service"):
            if phase.nbytes(name) != run.nbytes(name):
                raise BudgetError(
                    f"the plan counts {human(phase.nbytes(name))} for {name!r} in phase {phase.name}, "
                    f"but {human(run.nbytes(name))} in phase run"
                )
    for name in ("session", "weights"):
        if load.nbytes(name) < run.nbytes(name):
            raise BudgetError(f"the plan counts less for {name!r} in phase load than in phase run")


def _check_sweep(sweep: Sweep, run: Phase, budget: int) -> None:
    """What a pass needs must have been counted: all that stays, and for the others two places."""
    sizes = sweep.segment_bytes
    if not sweep.streamed or list(sweep.streamed) != sorted(set(sweep.streamed) & set(range(len(sizes)))):
        raise BudgetError(f"the sweep streams segments {list(sweep.streamed)} of {len(sizes)}")
    if min(sizes) < 0:
        raise BudgetError("a segment of the sweep has less than no bytes")
    circle = [sizes[step] for step in sweep.streamed]
    places = [circle[start::2] for start in (0, 1) if circle[start::2]]
    if sweep.pass_bytes != sum(sum(place) for place in places if len(place) > 1):
        raise BudgetError(f"the sweep's segments do not add up to {human(sweep.pass_bytes)} a pass")
    for term, needed in (("mapped_weights", sum(sizes) - sum(circle)), (RING, sum(max(place) for place in places))):
        if run.term(term) is None or run.nbytes(term) < needed:
            raise BudgetError(
                f"the plan counts {human(run.nbytes(term))} for {term!r}, but {human(needed)} are in memory at a time",
                "compile the bundle again",
            )
    room = budget - (run.total_bytes - run.nbytes("mapped_weights") - run.nbytes(RING))
    if (sweep.lru_bytes, sweep.belady_bytes) != (sum(sizes) if sum(sizes) > room else 0, max(sum(sizes) - room, 0)):
        raise BudgetError("the sweep's figures for other ways to cache are not those of its segments")
