"""Lifetimes as sections, and the parts that can be packed apart."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from compile.packing.problem import sections_of
from targets.arena import Buffer, lower_bound
from tests.support.packing import Span, problem_of, spans

lifetimes = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


@given(lifetimes)
def test_buffers_share_a_section_when_they_are_live_together(lives: list[tuple[int, int]]) -> None:
    begin, end = sections_of(lives)
    for i, (lower, upper) in enumerate(lives):
        for j, (other_lower, other_upper) in enumerate(lives):
            together = lower < other_upper and other_lower < upper
            assert (max(begin[i], begin[j]) < min(end[i], end[j])) == together


@given(lifetimes)
def test_no_section_is_part_of_another(lives: list[tuple[int, int]]) -> None:
    begin, end = sections_of(lives)
    sections = range(max(end.tolist(), default=0))
    live = [{i for i in range(len(lives)) if begin[i] <= section < end[i]} for section in sections]
    assert all(not one <= other for one in live for other in live if one is not other)


@given(spans())
def test_the_load_is_that_of_the_judge(spans: list[Span]) -> None:
    buffers = tuple(Buffer(str(i), *span) for i, span in enumerate(spans))
    assert problem_of(spans).load().max(initial=0) == lower_bound(buffers)


@given(spans())
def test_parts_have_nothing_in_common_and_are_as_small_as_they_can_be(spans: list[Span]) -> None:
    parts = [part.tolist() for part in problem_of(spans).parts() if len(part)]
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(spans)))
    for part in parts:
        steps = {step for i in part for step in range(*spans[i][:2])}
        assert len(steps) == max(steps) - min(steps) + 1
        assert not steps & {step for i in range(len(spans)) if i not in part for step in range(*spans[i][:2])}
        # Between any two steps one that is live in both.
        assert all(any(spans[i][0] < cut < spans[i][1] for i in part) for cut in sorted(steps)[1:])
