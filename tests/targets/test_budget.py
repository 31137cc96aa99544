"""What a board leaves for a model, and the judge of memory plans."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.arena import Arena, Placed
from targets.board import MIB, board_names, load_board
from targets.budget import MemoryPlan, Phase, Sweep, Term, budget_bytes, budget_of_machine, check_plan
from targets.errors import BudgetError

ARENA = Arena(height=100, lower_bound=100, alignment=1, buffers=(Placed("a", 0, 2, 100, 0),))


def plan(load: tuple[Term, ...] = (), run: tuple[Term, ...] = (), arena: Arena = ARENA) -> MemoryPlan:
    """A plan whose phases have the given terms beside the needed ones."""
    fixed = (Term("runtime", "anonymous", 50), Term("weights", "file", 200))
    needed = (*fixed, Term("activations", "anonymous", 100), Term("io_slots", "shared", 10))
    return MemoryPlan(1000, 2, (Phase("load", fixed + load), Phase("run", needed + run)), arena)


def without(whole: MemoryPlan, phase: str, term: str) -> MemoryPlan:
    phases = tuple(Phase(p.name, tuple(t for t in p.terms if (p.name, t.name) != (phase, term))) for p in whole.phases)
    return msgspec.structs.replace(whole, phases=phases)


def test_a_generic_4_gib_board_leaves_3481_mib() -> None:
    assert budget_bytes(load_board("generic-lpddr4x-4gb")) == 4096 * MIB * 85 // 100
    assert budget_bytes(load_board("generic-lpddr4x-4gb")) // MIB == 3481


@pytest.mark.parametrize("name", board_names())
def test_every_board_leaves_something_beside_its_runtime(name: str) -> None:
    board = load_board(name)
    total, fixed = board.memory.mem_total_mib * MIB, board.memory.runtime_fixed_mib * MIB
    assert fixed < budget_bytes(board) <= total - board.memory.os_reserve_mib * MIB
    assert budget_bytes(board) <= 0.85 * total


@given(total=st.integers(0, 1 << 40), reserve=st.integers(0, 1 << 34))
def test_the_machine_is_judged_by_the_same_rule(total: int, reserve: int) -> None:
    budget = budget_of_machine(total, reserve)
    assert budget in (total * 85 // 100, total - reserve)
    assert budget <= total * 85 // 100
    assert budget <= total - reserve


def test_a_plan_that_fits_to_the_byte_is_accepted() -> None:
    check_plan(plan(), 360)


def test_one_byte_more_is_refused_with_every_term() -> None:
    with pytest.raises(BudgetError) as caught:
        check_plan(plan(), 359)
    assert "phase run needs 360 B, but the budget is 359 B" in str(caught.value)
    assert "weights 200 B" in str(caught.value)


def test_the_load_phase_is_judged_too() -> None:
    with pytest.raises(BudgetError, match="phase load needs 400 B"):
        check_plan(plan(load=(Term("read_copy", "anonymous", 150),)), 390)


@pytest.mark.parametrize(
    ("phase", "term"),
    [
        ("load", "runtime"),
        ("load", "weights"),
        ("run", "runtime"),
        ("run", "weights"),
        ("run", "activations"),
        ("run", "io_slots"),
    ],
)
def test_a_plan_that_keeps_silent_is_refused(phase: str, term: str) -> None:
    with pytest.raises(BudgetError, match=f"phase {phase}: the plan says nothing of '{term}'"):
        check_plan(without(plan(), phase, term), 10_000)


def test_a_plan_may_begin_with_what_is_done_on_the_board() -> None:
    weights = (Term("runtime", "anonymous", 50), Term("weights", "anonymous", 500))
    whole = plan()
    finalised = msgspec.structs.replace(whole, phases=(Phase("finalise", weights), *whole.phases))
    check_plan(finalised, 550)
    with pytest.raises(BudgetError, match="phase finalise needs 550 B"):
        check_plan(finalised, 549)
    with pytest.raises(BudgetError, match="phase finalise: the plan says nothing of 'weights'"):
        check_plan(without(finalised, "finalise", "weights"), 10_000)
    last = msgspec.structs.replace(whole, phases=(*whole.phases, Phase("finalise", weights)))
    with pytest.raises(BudgetError, match="the plan has phases load, run, finalise"):
        check_plan(last, 10_000)


@pytest.mark.parametrize("names", [(), ("load",), ("run", "load"), ("load", "run", "run"), ("load", "walk")])
def test_exactly_the_known_phases_in_their_order(names: tuple[str, ...]) -> None:
    phases = tuple(Phase(name, ()) for name in names)
    with pytest.raises(BudgetError, match="the plan has phases"):
        check_plan(msgspec.structs.replace(plan(), phases=phases), 10_000)


def test_activations_below_the_arena_are_refused() -> None:
    higher = msgspec.structs.replace(ARENA, height=101)
    with pytest.raises(BudgetError, match="counts less for activations"):
        check_plan(plan(arena=higher), 10_000)


def test_a_broken_arena_is_refused() -> None:
    overlapping = Arena(100, 110, 1, (Placed("a", 0, 2, 100, 0), Placed("b", 1, 3, 10, 90)))
    with pytest.raises(BudgetError, match="'a' and 'b' are live together"):
        check_plan(plan(arena=overlapping), 10_000)


def test_terms_are_checked_when_made() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        Term("x", "gpu", 1)
    with pytest.raises(ValueError, match="cannot be negative"):
        Term("x", "file", -1)


def test_requests_that_share_a_pass_must_have_been_counted() -> None:
    mapped = Term("mapped_weights", "file", 30)
    waiting = Term("waiting", "anonymous", 0)
    ring = Term("ring", "shared", 30)
    two, one = Sweep((0, 1), (10, 20), 0, 0, 0), Sweep((0,), (30,), 0, 0, 0)

    def judge(sweep: Sweep, slots: int, *terms: Term) -> None:
        check_plan(msgspec.structs.replace(plan(run=(mapped, ring, *terms)), sweep=sweep, slots=slots), 1000)

    with pytest.raises(BudgetError, match="phase run: the plan says nothing of 'waiting', though 2 requests share"):
        judge(two, 2)
    judge(two, 2, waiting)
    judge(two, 1)
    judge(one, 2)


def test_phases_answer_by_kind_and_by_name() -> None:
    run = plan().phase("run")
    assert run.total_bytes == 360
    assert {kind: run.kind_bytes(kind) for kind in ("anonymous", "file", "shared")} == {
        "anonymous": 150,
        "file": 200,
        "shared": 10,
    }
    assert run.term("none") is None
    with pytest.raises(BudgetError, match="no phase 'walk'"):
        plan().phase("walk")
