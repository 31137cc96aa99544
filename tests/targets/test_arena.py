"""The judge of arenas, against a second judge that knows only bytes and steps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.arena import Arena, Buffer, Placed, check_arena, lower_bound
from targets.errors import BudgetError

STEPS, HEIGHT = 6, 12


@st.composite
def placed(draw: st.DrawFn, index: int, least: int = 0) -> Placed:
    lower = draw(st.integers(0, STEPS - 1))
    upper = draw(st.integers(lower + 1, STEPS))
    nbytes = draw(st.integers(least, 5))
    return Placed(f"b{index}", lower, upper, nbytes, draw(st.integers(0, HEIGHT - nbytes)))


@st.composite
def arenas(draw: st.DrawFn) -> Arena:
    """Any arena that breaks at most one rule: that no two buffers share a byte."""
    buffers = tuple(draw(placed(index)) for index in range(draw(st.integers(0, 6))))
    return Arena(HEIGHT, lower_bound(buffers), 1, buffers)


@st.composite
def good_arenas(draw: st.DrawFn) -> Arena:
    """An arena made by first fit, byte by byte, at a random alignment."""
    alignment = draw(st.sampled_from([1, 2, 4, 64]))
    taken: set[tuple[int, int]] = set()
    buffers: list[Placed] = []
    for index in range(draw(st.integers(1, 7))):
        buffer = draw(placed(index, least=1))
        offset = 0
        while cells(buffer, offset) & taken:
            offset += alignment
        taken |= cells(buffer, offset)
        buffers.append(msgspec.structs.replace(buffer, offset=offset))
    height = max(buffer.offset + buffer.nbytes for buffer in buffers)
    return Arena(height, lower_bound(tuple(buffers)), alignment, tuple(buffers))


def cells(buffer: Buffer, offset: int) -> set[tuple[int, int]]:
    return {(s, o) for s in range(buffer.lower, buffer.upper) for o in range(offset, offset + buffer.nbytes)}


def shares_a_byte(arena: Arena) -> bool:
    """Paint every buffer, step by step and byte by byte; True when something is painted twice."""
    painted: set[tuple[int, int]] = set()
    for buffer in arena.buffers:
        mine = cells(buffer, buffer.offset)
        if mine & painted:
            return True
        painted |= mine
    return False


def accepts(arena: Arena) -> bool:
    try:
        check_arena(arena)
    except BudgetError:
        return False
    return True


@given(arenas())
def test_both_judges_agree(arena: Arena) -> None:
    assert accepts(arena) != shares_a_byte(arena)


@given(good_arenas())
def test_good_arenas_are_accepted_and_not_below_their_bound(arena: Arena) -> None:
    check_arena(arena)
    assert arena.height >= arena.lower_bound


@given(good_arenas(), st.data())
def test_a_buffer_moved_onto_another_is_refused(arena: Arena, data: st.DataObject) -> None:
    together = [
        (index, other)
        for index, mine in enumerate(arena.buffers)
        for other in arena.buffers
        if other is not mine and other.lower < mine.upper and mine.lower < other.upper
    ]
    if not together:
        return
    index, other = data.draw(st.sampled_from(together))
    victim, onto = arena.buffers[index], other.offset
    moved = msgspec.structs.replace(victim, offset=onto)
    tampered = msgspec.structs.replace(
        arena,
        height=max(arena.height, onto + victim.nbytes),
        buffers=(*arena.buffers[:index], moved, *arena.buffers[index + 1 :]),
    )
    with pytest.raises(BudgetError, match="are live together and overlap"):
        check_arena(tampered)


@given(good_arenas(), st.data())
def test_other_tampering_is_refused(arena: Arena, data: st.DataObject) -> None:
    first = arena.buffers[0]
    rest = arena.buffers[1:]

    def moved(offset: int) -> Arena:
        return msgspec.structs.replace(arena, buffers=(msgspec.structs.replace(first, offset=offset), *rest))

    bad = {
        "lower height": msgspec.structs.replace(arena, height=arena.height - 1),
        "negative offset": moved(-arena.alignment),
        "past the end": moved((arena.height // arena.alignment + 1) * arena.alignment),
        "other bound": msgspec.structs.replace(arena, lower_bound=arena.lower_bound + data.draw(st.integers(1, 9))),
        "no alignment": msgspec.structs.replace(arena, alignment=0),
    }
    if arena.alignment > 1:
        bad["unaligned"] = msgspec.structs.replace(
            arena,
            height=arena.height + arena.alignment,
            buffers=(msgspec.structs.replace(first, offset=first.offset + 1), *rest),
        )
    for what, tampered in bad.items():
        assert not accepts(tampered), what


@given(st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(1, STEPS), st.integers(0, 9)), max_size=8))
def test_lower_bound_is_the_fullest_step(rows: list[tuple[int, int, int]]) -> None:
    buffers = tuple(Buffer(str(i), lo, lo + length, size) for i, (lo, length, size) in enumerate(rows))
    fullest = max((sum(b.nbytes for b in buffers if b.lower <= step < b.upper) for step in range(2 * STEPS)), default=0)
    assert lower_bound(buffers) == fullest


def test_buffers_whose_lives_only_touch_may_share_a_place() -> None:
    check_arena(Arena(8, 8, 1, (Placed("a", 0, 2, 8, 0), Placed("b", 2, 3, 8, 0))))


def test_an_empty_buffer_needs_no_room() -> None:
    check_arena(Arena(8, 8, 1, (Placed("a", 0, 2, 8, 0), Placed("empty", 0, 2, 0, 4))))


def test_an_arena_of_negative_height_is_refused() -> None:
    with pytest.raises(BudgetError, match="height"):
        check_arena(Arena(-1, 0, 1, ()))


@pytest.mark.parametrize(("lower", "upper", "size"), [(-1, 1, 1), (2, 2, 1), (3, 2, 1), (0, 1, -1)])
def test_impossible_buffers_are_refused(lower: int, upper: int, size: int) -> None:
    with pytest.raises(ValueError, match="buffer 'x'"):
        Buffer("x", lower, upper, size)
