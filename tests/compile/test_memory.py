"""The planner against the checker of `targets`, and the search for the arena that a runtime really needs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.backends.base import Step, Trace, WeightFootprint
from compile.memory import (
    PREFERENCE,
    SERVICE_BYTES,
    Footprint,
    _sweep,
    activation_buffers,
    arena_in_practice,
    choose,
    crossing_bytes,
    plan,
)
from compile.packing.place import ALIGNMENT, place
from targets.arena import Buffer
from targets.board import MIB, Board, load_board
from targets.budget import FINALISE, Term, budget_bytes, check_plan
from targets.bundle import Residency
from targets.errors import BudgetError


def step(name: str, reads: str, writes: str, size: int, allocated: int | None = None, inner: bool = False) -> Step:
    return Step(name, "Op", tuple(reads), tuple(writes), (size,), size if allocated is None else allocated, inner)


def test_a_buffer_lives_from_its_kernel_to_its_last_reader() -> None:
    trace = Trace((step("1", "x", "a", 256), step("2", "a", "b", 512), step("3", "ab", "y", 256)), {"y": 256}, 0)
    assert [(b.name, b.lower, b.upper, b.nbytes) for b in activation_buffers(trace)] == [
        ("a", 0, 3, 256), ("b", 1, 3, 512), ("y", 2, 3, 256),
    ]  # fmt: skip


def test_in_place_and_renamed_values_share_a_buffer() -> None:
    trace = Trace((step("1", "x", "a", 256), step("2", "a", "b", 256, 0), step("3", "b", "y", 256, 0)), {"y": 256}, 0)
    assert [(b.name, b.lower, b.upper) for b in activation_buffers(trace)] == [("a", 0, 3)]


def test_a_view_of_an_input_takes_nothing() -> None:
    trace = Trace((step("1", "x", "a", 256, 0), step("2", "a", "y", 100)), {"y": 100}, 0)
    assert [(b.name, b.nbytes) for b in activation_buffers(trace)] == [("y", 256)]


def test_a_buffer_that_was_done_with_is_held_from_its_first_use_to_its_last() -> None:
    """The runtime gives `c` the buffer of `a`; of the larger input that it could not have taken, nothing is held on."""
    steps = (
        step("1", "", "a", 1 << 10),
        step("2", "a", "b", 4 << 10),
        step("3", "b", "c", 1 << 10, 0),
        step("4", "c", "d", 1 << 10),
    )
    found = {b.name: (b.lower, b.upper, b.nbytes) for b in activation_buffers(Trace(steps, {"d": 1 << 10}, 0))}
    assert found == {"a": (0, 4, 1 << 10), "b": (1, 3, 4 << 10), "d": (3, 4, 1 << 10)}


def test_an_output_lives_to_the_end_though_it_is_read_before() -> None:
    steps = (step("1", "x", "a", 256), step("2", "a", "b", 256), step("3", "b", "y", 256))
    buffers = activation_buffers(Trace(steps, {"y": 256, "a": 256}, 0))
    assert {b.name: b.upper for b in buffers} == {"a": 3, "b": 3, "y": 3}


def test_kernels_of_a_body_live_to_the_end_of_the_node_around_them() -> None:
    steps = (step("1", "x", "a", 256, inner=True), step("2", "a", "b", 256, inner=True), step("if", "", "y", 256))
    assert {b.name: b.upper for b in activation_buffers(Trace(steps, {"y": 256}, 0))} == {"a": 3, "b": 3, "y": 3}


@given(st.integers(0, 1 << 28), st.integers(0, 1 << 28), st.integers(0, 1 << 30))
def test_the_arena_that_is_certified_has_been_seen_to_work(planned: int, observed: int, needed: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size >= needed

    found = arena_in_practice(planned, observed, fits, 2 << 30)
    assert found >= needed
    assert found in tried
    assert found <= max(planned + ALIGNMENT, observed + ALIGNMENT, needed * 1.06 + (1 << 16) + ALIGNMENT)
    assert len(tried) < 40


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24), st.integers(0, 1 << 24))
def test_an_arena_is_little_larger_than_the_smallest(planned: int, above: int, needed: int) -> None:
    """Whatever peak an arena that grew has reported."""
    found = arena_in_practice(planned, planned + above, lambda size: size >= needed, 2 << 30)
    least = max(planned, needed)
    assert needed <= found <= least + max(least // 20, 1 << 16) + 256


def test_a_model_that_no_arena_holds_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"no arena of up to 1.0 MiB lets the model run"):
        arena_in_practice(1000, 0, lambda _: False, 1 << 20)


def test_the_plan_counts_every_part_once_for_each_phase() -> None:
    board = load_board("raspberry-pi-5-4gb")
    arena = place((Buffer("a", 0, 1, 512),))
    weights = WeightFootprint(1000, 200, 30, 500, touched=150, transit_heap=5, transit_file=400)
    needs = Footprint([weights], workspace=7, slot=11, inputs=4)
    made = plan(board, arena, needs, slots=3, residencies=(Residency.HEAP,))
    fixed = (board.memory.runtime_fixed_mib << 20) + SERVICE_BYTES
    assert made.phase("load").total_bytes == fixed + 30 + 1000 + 150 + 5 + 400
    index = 3 * 8
    assert made.phase("run").total_bytes == fixed + 30 + 1000 + 200 + 512 + 7 + index + 3 * 11 + 3 * 2 * 4
    assert made.budget_bytes == budget_bytes(board)
    check_plan(made, made.budget_bytes)
    with pytest.raises(BudgetError, match=r"phase (load|run) needs"):
        check_plan(made, max(phase.total_bytes for phase in made.phases) - 1)


def test_the_worst_moment_of_loading_is_of_the_optimizer_or_of_one_copy() -> None:
    """Whichever takes more; a kernel that asks the arena has it make its index, which the optimizer does not see."""
    board = load_board("raspberry-pi-5-4gb")
    arena = place((Buffer("a", 0, 1, 256 * 100),))
    for optimizing, indexes, most in ((900, False, 900 - 100), (500, False, 405), (900, True, 5 + 800 + 400)):
        part = WeightFootprint(
            *(1000, 200, 30, 500),
            rearranged=900,
            transit_heap=5,
            transit_file=400,
            optimizing=optimizing,
            indexes=indexes,
        )
        made = plan(board, arena, Footprint([part], 0, 0, 0), 1, (Residency.HEAP,))
        fixed = (board.memory.runtime_fixed_mib << 20) + SERVICE_BYTES
        assert made.phase("load").total_bytes == fixed + 30 + 1000 + most


def test_kernels_whose_weights_are_not_laid_out_need_scratch_one_at_a_time() -> None:
    part = WeightFootprint(1000, 200, 30, 500, sources=1000, unpacked_scratch=4096)
    needs = Footprint([part, part], workspace=7, slot=0, inputs=0)
    board = load_board("raspberry-pi-5-4gb")
    found = {each: plan(board, ARENA, needs, 1, (each,) * 2).phase("run").term("scratch") for each in Residency}
    assert {each: term.nbytes for each, term in found.items() if term} == {Residency.UNPACKED: 4096}


def board_of(budget: int) -> Board:
    """A board that leaves about `budget` bytes for the service."""
    board = load_board("raspberry-pi-5-4gb")
    total = -(-budget * 100 // 85 // MIB)
    changed = msgspec.structs.replace(
        board.memory, mem_total_mib=total, physical_mib=total, os_reserve_mib=1, runtime_fixed_mib=150
    )
    return msgspec.structs.replace(board, memory=changed)


ARENA = place((Buffer("a", 0, 1, 8 * MIB),))
SEGMENTS = [
    WeightFootprint(
        heap=300 * MIB,
        mapped=10 * MIB,
        session=MIB,
        largest=100 * MIB,
        largest_mapped=5 * MIB,
        copies=300 * MIB,
        sources=300 * MIB,
        transit_file=100 * MIB,
    )
] * 4


HEAP, MAPPED, STREAMED, UNPACKED = Residency.HEAP, Residency.MAPPED, Residency.STREAMED, Residency.UNPACKED


@pytest.mark.parametrize(
    ("quantized", "megabytes", "expected"),
    [
        (True, 3000, [HEAP] * 4),
        (True, 2300, [HEAP] * 4),
        # The heap would fit (1504), but fill more than two thirds with what cannot be evicted.
        (True, 1600, [MAPPED] * 4),
        # Mapped, while the largest weight is laid out once more beside its source: 1555. Loaded and let go one by one
        # they fit, and two of four are always there.
        (True, 1450, [STREAMED, MAPPED, STREAMED, MAPPED]),
        (True, 1300, [STREAMED, STREAMED, STREAMED, MAPPED]),
        (True, 900, [STREAMED] * 4),
        (False, 2300, [HEAP] * 4),
        (False, 1450, [UNPACKED] * 4),
        (False, 1300, [STREAMED, STREAMED, STREAMED, MAPPED]),
    ],
)
def test_weights_move_out_of_memory_as_the_budget_shrinks(
    quantized: bool, megabytes: int, expected: list[Residency]
) -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB)
    residencies, made = choose(board_of(megabytes * MIB), ARENA, needs, 2, None, quantized)
    assert list(residencies) == expected
    check_plan(made, made.budget_bytes)
    laid_out = [FINALISE] if expected[0] in (MAPPED, STREAMED) else []
    assert [phase.name for phase in made.phases] == [*laid_out, "load", "run"]
    run = made.phase("run")
    weights, mapped = run.term("weights"), run.term("mapped_weights")
    assert weights is not None
    assert mapped is not None
    assert weights.nbytes == (1200 * MIB if HEAP in expected else 0)
    # Two streamed segments are there at a time, and all that stay; as the heap has it, all is there but the copies.
    staying = expected.count(MAPPED) + expected.count(UNPACKED)
    assert mapped.nbytes == (40 * MIB if HEAP in expected else staying * 310 * MIB)
    assert run.nbytes("ring") == min(expected.count(STREAMED), 2) * 310 * MIB
    assert (made.sweep is None) == (STREAMED not in expected)
    if made.sweep:
        # Of three, one has a place for itself.
        assert made.sweep.pass_bytes == {2: 0, 3: 2, 4: 4}[expected.count(STREAMED)] * 310 * MIB
        assert made.sweep.lru_bytes in (0, 4 * 310 * MIB)


def test_what_crosses_a_cut_is_what_a_later_segment_reads() -> None:
    """In whole pages; inputs stand in the slot, and so do results as soon as they are made."""
    made = ({"a": 9000, "b": 256, "y": MIB}, {"c": 8192, "z": MIB}, {"d": 256})
    read = (("x",), ("a", "x"), ("b", "c", "x"))
    assert crossing_bytes(made, read) == (3 + 1) * 4096 == (1 + 3) * 4096
    assert crossing_bytes(made[:1], read[:1]) == 0
    assert crossing_bytes(({"y": 256}, {"z": 256}), (("x",), ("y",))) == 4096


@pytest.mark.parametrize(
    ("residency", "slots", "expected"), [(STREAMED, 4, 4 * 3 * MIB), (STREAMED, 1, 0), (MAPPED, 4, None)]
)
def test_requests_that_share_a_pass_wait_at_a_cut(residency: Residency, slots: int, expected: int | None) -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB, crossing=3 * MIB)
    run = plan(board_of(1400 * MIB), ARENA, needs, slots, (residency,) * 4).phase("run")
    assert run.term("waiting") == (None if expected is None else Term("waiting", "anonymous", expected))


@pytest.mark.parametrize("residency", [HEAP, MAPPED, STREAMED])
def test_requests_that_are_put_together_are_copied_once(residency: Residency) -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB, batch=3 * MIB)
    made = [plan(board_of(1400 * MIB), ARENA, needs, slots, (residency,) * 4).phase("run") for slots in (1, 2, 8)]
    assert [run.nbytes("batch") for run in made] == [0, 3 * MIB, 3 * MIB]


KIB = 1 << 10


@pytest.mark.parametrize(
    ("slot", "slots"),
    [(1 * KIB, 32), (128 * KIB, 32), (1 * MIB, 14), (2 * MIB, 7), (16 * MIB, 2)],
    ids=str,
)
def test_slots_are_as_many_as_are_a_small_matter(slot: int, slots: int) -> None:
    """A slot and two copies of its body, whose inputs are half of it; once more the inputs for batches. 3 % of the
    budget, between 2 and 32; a number that is given is taken."""
    board = board_of(1000 * MIB)
    needs = Footprint(SEGMENTS[:1], workspace=MIB, slot=slot, inputs=slot // 2, batch=slot // 2)
    _, made = choose(board, ARENA, needs, None, None, quantized=False)
    assert made.slots == slots
    run = made.phase("run")
    spent = sum(run.nbytes(name) for name in ("io_slots", "bodies", "batch"))
    assert spent == slots * 2 * slot + slot // 2
    assert slots == 2 or spent <= 0.03 * made.budget_bytes
    assert slots == 32 or spent + 2 * slot > 0.03 * made.budget_bytes
    assert choose(board, ARENA, needs, 7, None, quantized=False)[1].slots == 7


def test_slots_never_change_where_weights_are() -> None:
    """Step by step to boards that have no room for more slots than the least on top of the model."""
    needs, seen = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB // 2, batch=MIB // 2), set()
    for megabytes in range(700, 2300, 10):
        least, few = choose(board_of(megabytes * MIB), ARENA, needs, 2, None, quantized=True)
        found, made = choose(board_of(megabytes * MIB), ARENA, needs, None, None, quantized=True)
        assert found == least
        assert made.slots >= few.slots == 2
        fits = all(phase.total_bytes <= few.budget_bytes for phase in few.phases)
        assert not fits or all(phase.total_bytes <= made.budget_bytes for phase in made.phases)
        seen.add((least[0], made.slots > 2))
    assert {residency for residency, _ in seen} == {HEAP, MAPPED, STREAMED}
    assert {more for _, more in seen} == {True, False}


def test_what_is_streamed_is_as_little_as_fits_and_far_apart() -> None:
    """Of twelve segments: with every byte more that the board has, no more is streamed than before."""
    parts = [distinct(part, at) for at, part in enumerate(SEGMENTS * 3)]
    needs = Footprint(parts, workspace=MIB, slot=MIB, inputs=MIB)
    least = None
    for megabytes in range(1000, 4200, 200):
        residencies, made = choose(board_of(megabytes * MIB), ARENA, needs, 2, None, quantized=True)
        check_plan(made, made.budget_bytes)
        if made.sweep is None:
            break
        assert least is None or made.sweep.pass_bytes <= least
        assert made.sweep.belady_bytes <= made.sweep.pass_bytes
        least = made.sweep.pass_bytes
        if residencies.count(STREAMED) <= 6:
            assert all({a, b} != {STREAMED} for a, b in itertools.pairwise(residencies))
    assert least is not None


def distinct(part: WeightFootprint, at: int) -> WeightFootprint:
    """The same with a few bytes of its own, so that no two are equal."""
    return dataclasses.replace(part, copies=part.copies + at * 4096)


@pytest.mark.parametrize(
    ("term", "value"),
    [
        ("streamed", (0,)),
        ("streamed", (1, 0)),
        ("streamed", (0, 9)),
        ("streamed", ()),
        ("segment_bytes", (310 * MIB,) * 3),
        ("segment_bytes", (310 * MIB - 4096, 310 * MIB, 310 * MIB, 310 * MIB)),
        ("segment_bytes", (-1, 310 * MIB, 310 * MIB, 310 * MIB)),
        ("pass_bytes", 0),
        ("lru_bytes", 1),
        ("belady_bytes", 1),
    ],
)
def test_a_sweep_that_was_tampered_with_is_refused(term: str, value: object) -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB)
    _, made = choose(board_of(1300 * MIB), ARENA, needs, 2, None, quantized=True)
    assert made.sweep is not None
    check_plan(made, made.budget_bytes)
    tampered = msgspec.structs.replace(made, sweep=msgspec.structs.replace(made.sweep, **{term: value}))
    with pytest.raises(BudgetError):
        check_plan(tampered, made.budget_bytes)


def test_when_nothing_fits_the_checker_says_what_is_too_large() -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB)
    residencies, made = choose(board_of(500 * MIB), ARENA, needs, 2, None, quantized=True)
    assert residencies == (STREAMED,) * 4
    with pytest.raises(BudgetError, match=r"phase (finalise|load|run) needs .*weights"):
        check_plan(made, made.budget_bytes)


@pytest.mark.parametrize("requested", Residency)
def test_a_residency_that_was_asked_for_is_kept_if_it_fits_or_not(requested: Residency) -> None:
    needs = Footprint(SEGMENTS, workspace=MIB, slot=MIB, inputs=MIB)
    for megabytes in (8000, 1600):
        residencies, made = choose(board_of(megabytes * MIB), ARENA, needs, 2, requested, quantized=True)
        assert residencies == (requested,) * 4
        assert made == plan(board_of(megabytes * MIB), ARENA, needs, 2, residencies)
        check_plan(made, made.budget_bytes)
    with pytest.raises(BudgetError):
        check_plan(choose(board_of(400 * MIB), ARENA, needs, 2, requested, quantized=True)[1], 400 * MIB)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500), st.integers(1, 100)), min_size=1, max_size=6),
    st.integers(300, 8000),
    st.booleans(),
)
def test_what_fits_in_some_way_is_compiled(parts: list[tuple[int, int, int]], megabytes: int, quantized: bool) -> None:
    weights = [
        WeightFootprint(heap * MIB, mapped * MIB, MIB, min(heap, one) * MIB, copies=heap * MIB, sources=heap * MIB)
        for heap, mapped, one in parts
    ]
    needs, board = Footprint(weights, workspace=0, slot=MIB, inputs=0), board_of(megabytes * MIB)
    residencies, made = choose(board, ARENA, needs, 2, None, quantized)

    def fits(each: tuple[Residency, ...]) -> bool:
        try:
            check_plan(plan(board, ARENA, needs, 2, each), budget_bytes(board))
        except BudgetError:
            return False
        return True

    alike = [(each,) * len(parts) for each in (*PREFERENCE[quantized], STREAMED)]
    assert fits(residencies) or not any(map(fits, alike))
    # Streaming is slowest: only what fits in no other way.
    assert STREAMED not in residencies or not any(map(fits, alike[:-1]))
    if made.sweep and fits(residencies):
        assert made.sweep.pass_bytes <= sum(made.sweep.segment_bytes)


def simulated(sizes: Sequence[int], room: int, evict_next: bool) -> int:
    """Pages that the last of many passes reads, where a cache of `room` pages evicts what was used last, or, of what
    is needed next, the last (Belady); every page of a segment is read once in its turn."""
    pages = [(step, at) for step, size in enumerate(sizes) for at in range(size)]
    cached: dict[tuple[int, int], int] = {}
    read = total = 0
    passes = 12
    for turn in range(passes):
        read = 0
        for at, page in enumerate(pages):
            now = turn * len(pages) + at
            if page not in cached:
                read += 1
                if len(cached) >= room:
                    # In a circle, what was used just now is needed last, and what was used first is needed next.
                    others = cached if room else {}
                    victim = (max if evict_next else min)(others, key=lambda each: cached[each])
                    del cached[victim]
            cached[page] = now
        total += read if turn >= passes // 2 else 0
    return round(total / (passes - passes // 2)) if evict_next else read


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(2, 60))
def test_what_other_caches_would_read_is_what_a_simulation_of_them_reads(sizes: list[int], room: int) -> None:
    page = 4096
    parts = [WeightFootprint(0, 0, 0, 0, copies=size * page) for size in sizes]
    found = _sweep(parts, (STREAMED,) * len(parts), room * page)
    assert found.lru_bytes == simulated(sizes, room, evict_next=False) * page
    # A cache that holds what it reads has one page less for the others than one that need not.
    assert abs(found.belady_bytes // page - simulated(sizes, room, evict_next=True)) <= 1
