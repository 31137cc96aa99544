"""The best cuts against every partition there is, judged by code that shares nothing with theirs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compile.partition.cuts import Cuts, Loading, NoCutsError, Rates, Rules, best_cuts, least_budget
from compile.partition.greedy import Position
from compile.partition.tables import Activation, Order, legal_ends, tables
from tests.compile.partition.orders import active_bytes, judge, orders, partitions, problems, weights_of

ALL = tuple(Loading)
STREAMED = (Loading.ALONE, Loading.AHEAD)
MANY = settings(max_examples=1000)


def cheapest(order: Order, rules: Rules, rates: Rates) -> int | None:
    """Least cost over every partition; None where none keeps to the rules."""
    judged = [judge(order, ends, rules, rates) for ends in partitions(order)]
    costs = [c for c, needed in judged if c is not None and (rules.budget is None or needed <= rules.budget)]
    return min(costs, default=None)


def check(found: Cuts, order: Order, rules: Rules, rates: Rates) -> None:
    """The result keeps to the rules, costs what it says, and is no worse than what it is shown beside."""
    cost, needed = judge(order, found.ends, rules, rates)
    assert cost == found.cost_ns
    assert rules.budget is None or needed <= rules.budget
    greedy, greedy_needed = judge(order, found.greedy_ends, rules, rates)
    if greedy is not None and (rules.budget is None or greedy_needed <= rules.budget):
        assert found.greedy_ns == greedy
        assert found.cost_ns <= greedy
    else:
        assert found.greedy_ns is None
    assert found.bound_ns <= found.cost_ns


def compare(problem: tuple[Order, Rules, Rates]) -> None:
    order, rules, rates = problem
    least = cheapest(order, rules, rates)
    try:
        found = best_cuts(order, rules, rates)
    except NoCutsError:
        assert least is None
        check_least(order, rules, rates)
        return
    assert found.exact
    assert found.cost_ns == least
    check(found, order, rules, rates)


def check_least(order: Order, rules: Rules, rates: Rates) -> None:
    """The least budget is that of all partitions which keep to the other rules."""
    needs = [needed for cost, needed in (judge(order, e, rules, rates) for e in partitions(order)) if cost is not None]
    found = least_budget(order, rules, rates)
    if found is None:
        assert not needs
    else:
        assert found[0] == min(needs)
        assert 0 <= found[1] < len(order.positions)


@given(problems(ALL))
def test_no_partition_costs_less(problem: tuple[Order, Rules, Rates]) -> None:
    compare(problem)


@pytest.mark.slow
@MANY
@given(problems((Loading.KEPT, Loading.ALONE)))
def test_no_partition_costs_less_without_reading_ahead(problem: tuple[Order, Rules, Rates]) -> None:
    compare(problem)


@pytest.mark.slow
@MANY
@given(problems((Loading.AHEAD,)))
def test_no_partition_costs_less_when_the_next_is_read_ahead(problem: tuple[Order, Rules, Rates]) -> None:
    compare(problem)


@given(orders(24))
def test_tables_say_what_a_segment_holds(order: Order) -> None:
    ends = legal_ends(order.positions)
    found = tables(order, ends)
    for a, start in enumerate(found.bounds):
        for b in range(a + 1, len(found.bounds)):
            end = found.bounds[b]
            assert found.weights[a, b] == sum(weights_of(order, start, end).values())
            assert found.active[a, b] == active_bytes(order, start, end)
            assert found.work_ns[a, b] == sum(order.work_ns[start:end])


@given(problems(ALL, 30), st.integers(1, 12))
def test_fewer_candidates_cost_no_more_than_greedy_and_tell_their_gap(
    problem: tuple[Order, Rules, Rates], most: int
) -> None:
    order, rules, rates = problem
    try:
        found = best_cuts(order, rules, rates, most)
    except NoCutsError:
        assume(False)
    check(found, order, rules, rates)
    whole = best_cuts(order, rules, rates)
    assert found.bound_ns <= whole.cost_ns <= found.cost_ns
    if found.exact:
        assert whole.cost_ns == found.cost_ns


# -- by hand ---------------------------------------------------------------------------------------------------------


def chain(*weights: int, crossing: int = 1, work_ns: int = 0) -> Order:
    """One weight a node, one value between neighbours."""
    count = len(weights)
    positions = [Position(((f"w{at}", nbytes),), crossing) for at, nbytes in enumerate(weights)]
    values = [Activation(at, (at + 1,), crossing) for at in range(count - 1)]
    return Order(positions, values, [work_ns] * count)


GIGABYTE_S = Rates(1e9, 1e9, 1)


def test_a_model_that_fits_is_one_segment() -> None:
    found = best_cuts(chain(10, 10, 10), Rules(budget=100), GIGABYTE_S)
    assert (found.ends, found.cost_ns, found.exact) == ((3,), 1, True)


def test_a_graph_without_nodes_is_one_segment() -> None:
    assert best_cuts(Order([], [], []), Rules(), GIGABYTE_S).ends == (0,)


def test_loading_hides_under_the_segment_in_front() -> None:
    order = chain(30, 30, 30, 30, work_ns=40)
    alone = best_cuts(order, Rules(Loading.ALONE, budget=64), GIGABYTE_S)
    ahead = best_cuts(order, Rules(Loading.AHEAD, budget=64), GIGABYTE_S)
    assert alone.ends == (2, 4)
    assert alone.cost_ns == 120 + 2 * (1 + 1)
    # Two of them are in memory at a time, so each is half as large; all four loads are hidden.
    assert ahead.ends == (1, 2, 3, 4)
    assert ahead.cost_ns == 4 + 6


def test_a_tied_weight_counts_in_each_segment() -> None:
    table = Position((("table", 50),), 1)
    middle = [Position(((f"w{at}", 40),), 1) for at in range(3)]
    order = Order([table, *middle, table], [Activation(at, (at + 1,), 1) for at in range(4)], [0] * 5)
    assert best_cuts(order, Rules(Loading.ALONE, budget=100), GIGABYTE_S).cost_ns > 2 * 50 + 3 * 40


def test_the_least_budget_and_the_node_that_needs_it() -> None:
    order, rules = chain(10, 70, 10), Rules(Loading.ALONE, budget=50)
    with pytest.raises(NoCutsError):
        best_cuts(order, rules, GIGABYTE_S)
    assert least_budget(order, rules, GIGABYTE_S) == (72, 1)
    assert least_budget(order, dataclasses.replace(rules, count=4), GIGABYTE_S) is None


def test_a_long_order_is_cut_in_bounded_time_and_says_how_far_it_may_be_off() -> None:
    order = chain(*[1 + at % 7 for at in range(20_000)], work_ns=1)
    total = sum(1 + at % 7 for at in range(20_000))
    for loading, budget in ((Loading.ALONE, total // 5), (Loading.AHEAD, total // 3)):
        found = best_cuts(order, Rules(loading, budget=budget), GIGABYTE_S)
        assert not found.exact
        assert found.bound_ns <= found.cost_ns <= (found.greedy_ns or found.cost_ns)
        assert found.cost_ns <= found.bound_ns * 1.01
