"""What a bundle's plan must count at the least, derived from the bundle again: no compiler is taken at its word.

`targets.budget.check_plan` judges a plan in itself; here it is held against the contract, the segments, their weights
and the board. This stands against somebody who seals what he changed. What only a run shows cannot be derived (the
runtime's sessions and scratch, what is there besides while weights are laid out, the places of buffers): for that there
is the manifest's seal.
"""

from __future__ import annotations

from pathlib import Path

from agent.external_data import outside
from targets.board import MIB, board_names, load_board
from targets.budget import ANSWERS, BATCH, FINALISE, TOKENIZER, Phase, budget_bytes
from targets.bundle import Manifest, Residency, safe_path
from targets.errors import BudgetError
from targets.generation import tokenizer_bytes
from targets.recipe import memory_bytes
from targets.tensor import Contract, DType, TensorSpec, human, nbytes

BODY_COPIES = 2
"""Of each request that is read: the parts that arrived, and the body that they are joined to (`agent.http.bodies`)."""

_TOGETHER = (
    {Residency.HEAP},
    {Residency.MAPPED},
    {Residency.UNPACKED},
    {Residency.STREAMED},
    {Residency.MAPPED, Residency.STREAMED},
)
"""Residencies that one plan can have: it knows no terms for others beside each other."""


def check_certificate(manifest: Manifest) -> None:
    """Compare the plan with everything but the weights. Raises BudgetError at the first that does not hold."""
    _check_board(manifest)
    _check_contract(manifest.contract)
    _check_residencies(manifest)
    _check_requests(manifest)


def _check_board(manifest: Manifest) -> None:
    """Of a board that nobody here knows, only what this machine has counts."""
    if manifest.target not in board_names():
        return
    board = load_board(manifest.target)
    budget, fixed = budget_bytes(board), board.memory.runtime_fixed_mib * MIB
    if manifest.plan.budget_bytes > budget:
        raise BudgetError(
            f"the plan is made for {human(manifest.plan.budget_bytes)}, but {manifest.target} leaves {human(budget)}",
            "compile the bundle again",
        )
    _check_counted(manifest.plan.phase("run"), "runtime", fixed, "the runtime")


def _check_contract(contract: Contract) -> None:
    """Inputs have the bytes that their dimensions allow. Outputs may follow from the data, strings have no size."""
    for spec in contract.inputs:
        if spec.dtype is not DType.STRING and spec.max_nbytes < _allowed(spec, contract):
            raise BudgetError(
                f"input {spec.describe()} is said to have at most {human(spec.max_nbytes)}, but its dimensions allow "
                f"{human(_allowed(spec, contract))}",
                "compile the bundle again",
            )


def _allowed(spec: TensorSpec, contract: Contract) -> int:
    return nbytes(spec.dtype, [dim if isinstance(dim, int) else contract.dims[dim].max for dim in spec.shape])


def _check_residencies(manifest: Manifest) -> None:
    """The plan's phases and its sweep are those of where the segments say that their weights are."""
    plan, placed = manifest.plan, [segment.residency for segment in manifest.segments]
    if set(placed) not in _TOGETHER:
        found = " and ".join(sorted(each.value for each in set(placed)))
        raise BudgetError(f"segments are {found}, which no plan has beside each other", "compile the bundle again")
    if placed[0].needs_finalise != (plan.phases[0].name == FINALISE):
        raise BudgetError(
            f"segments are {placed[0].value}, but the plan {'has a' if plan.phases[0].name == FINALISE else 'has no'} "
            f"phase {FINALISE}",
            "compile the bundle again",
        )
    streamed = tuple(step for step, each in enumerate(placed) if each is Residency.STREAMED)
    swept, of = (plan.sweep.streamed, len(plan.sweep.segment_bytes)) if plan.sweep else ((), len(placed))
    if (swept, of) != (streamed, len(placed)):
        raise BudgetError(
            f"the plan streams segments {list(swept)} of {of}, but of {len(placed)} are streamed {list(streamed)}",
            "compile the bundle again",
        )


def _check_requests(manifest: Manifest) -> None:
    """Slots, images, the bodies that are read, and the inputs of requests that are put together."""
    plan, contract, recipe = manifest.plan, manifest.contract, manifest.recipe
    run = plan.phase("run")
    taken = sum(spec.max_nbytes for spec in contract.inputs)
    places = sum(map(sum, contract.places))
    longest = sum(spec.max_nbytes for spec in contract.whole.inputs)
    body = max(longest, recipe.decode.max_bytes if recipe else 0)
    _check_counted(run, "io_slots", plan.slots * places, f"its {plan.slots} slots")
    if recipe:
        _check_counted(run, "recipe", memory_bytes(recipe, contract), "images")
    _check_counted(run, "bodies", plan.slots * body * BODY_COPIES, "bodies of requests")
    if manifest.generation:
        sizes = [entry.nbytes for entry in manifest.files if entry.path == manifest.generation.tokenizer]
        for phase in (plan.phase("load"), run):
            _check_counted(phase, TOKENIZER, tokenizer_bytes(sum(sizes)), "the tokenizer")
    if contract.split:
        _check_counted(run, ANSWERS, plan.slots * contract.answer_bytes, "answers that are put together of windows")
    if contract.batch_rows and plan.slots > 1:
        _check_counted(run, BATCH, taken, "requests that are put together")


def check_weights(folder: Path, manifest: Manifest) -> None:
    """Compare the plan's weights with what the segments' graphs keep outside; their files are verified before.

    Wherever they are while the bundle is served, a copy that a kernel makes is no smaller than its source. What is
    swept counts a segment's tables by the rows that a run reads, so that of those the rest alone is compared. Raises
    BudgetError or AgentError.
    """
    run, sweep = manifest.plan.phase("run"), manifest.plan.sweep
    sizes = [outside(safe_path(folder, segment.file)) for segment in manifest.segments]
    if sweep is None:
        needed, counted = sum(size.nbytes for size in sizes), run.nbytes("weights") + run.nbytes("mapped_weights")
        if counted < needed:
            raise _too_little(counted, "weights", needed)
        return
    for segment, size, counted in zip(manifest.segments, sizes, sweep.segment_bytes, strict=True):
        if counted < size.whole:
            raise _too_little(counted, f"the weights of {segment.file}", size.whole)


def _check_counted(phase: Phase, term: str, needed: int, what: str) -> None:
    if phase.nbytes(term) < needed:
        raise _too_little(phase.nbytes(term), what, needed)


def _too_little(counted: int, what: str, needed: int) -> BudgetError:
    return BudgetError(
        f"the plan counts {human(counted)} for {what}, which need {human(needed)}", "compile the bundle again"
    )
