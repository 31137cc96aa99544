"""The scheduler under load, in simulated and seeded time: runs take what a curve says, more or less."""

from __future__ import annotations

import pytest

from agent.scheduling.batch import Limits
from bench.simulated_scheduling import (
    CURVES,
    ROWS,
    Curve,
    Fixed,
    Source,
    Tally,
    Tightfit,
    capacity,
    simulate,
    tightfit,
)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("load", [0.5, 0.95, 1.2, 2.0])
def test_goodput_holds_at_every_load(name: str, load: float) -> None:
    """As much is done in time as first in, first out does in batches of the best size at low loads, and far more under
    overload; hardly anything runs in vain."""
    curve = CURVES[name]
    source = Source("s", rate=load * capacity(curve), deadline_s=10 * curve(1))
    seconds = 2000 / capacity(curve)
    goodput = []
    for policy in (tightfit({"m": curve}), Fixed(1, 96), Fixed(16, 96)):
        tallies, _ = simulate(policy, [source], {"m": curve}, seconds)
        tally = tallies["s"]
        goodput.append(len(tally.latencies) / seconds / capacity(curve))
        if len(goodput) == 1:
            assert tally.late <= 0.02 * tally.sent
    assert goodput[0] >= min(0.95 * load, 0.75)
    assert goodput[0] >= (0.95 if load < 1 else 3) * max(goodput[1:]) or goodput[0] >= 0.9


def test_a_flood_of_low_priority_hardly_delays_the_high() -> None:
    """16 clients that ask for 10 ms without a pause, and one of priority 1 beside them."""
    curves: dict[str, Curve] = {"m": lambda rows: 0.010 * rows}
    high = Source("high", priority=1, think_s=0.003)
    low = Source("low", priority=200, clients=16)

    def run(*sources: Source) -> dict[str, Tally]:
        return simulate(tightfit(curves), list(sources), curves, 10, stalls=0)[0]

    alone, flood, both = run(high)["high"], run(low)["low"], run(high, low)
    assert both["high"].quantile(0.99) <= 2.5 * alone.quantile(0.99)
    assert len(both["low"].latencies) + len(both["high"].latencies) >= 0.95 * len(flood.latencies)
    assert both["low"].latencies


@pytest.mark.parametrize("wrong", [1 / 3, 1.34, 3.0])
def test_a_wrong_profile_refuses_nothing_that_is_feasible(wrong: float) -> None:
    """A client that asks one after another, for twice what a run takes."""
    curve = CURVES["flat"]
    source = Source("s", deadline_s=2 * curve(1), think_s=0.005)
    tallies, _ = simulate(tightfit({"m": curve}, wrong=wrong), [source], {"m": curve}, 10, stalls=0)
    assert tallies["s"].sent > 500
    assert not tallies["s"].refused + tallies["s"].dropped + tallies["s"].late


def test_one_client_cannot_crowd_out_another() -> None:
    """Fifty requests at any time of one client, beside another that asks one after another."""
    curve = CURVES["flat"]
    sources = [Source("crowd", clients=50, alike=True), Source("modest", think_s=0.001)]
    modest = simulate(tightfit({"m": curve}, slots=64), sources, {"m": curve}, 10, stalls=0)[0]["modest"]
    # What runs, at most one of the crowd, and its own.
    assert modest.quantile(0.99) <= 3.5 * curve(1)


def test_two_models_share_by_weight_under_load() -> None:
    curves = {"a": CURVES["flat"], "b": CURVES["flat"]}
    sources = [Source(model, model, clients=8) for model in curves]
    tallies, ran = simulate(tightfit(curves), sources, curves, 10, stalls=0)
    used = {model: sum(each.took_s for each in ran if each.requests[0].model == model) for model in curves}
    assert used["a"] == pytest.approx(used["b"], rel=0.05)
    assert all(not tally.refused + tally.dropped for tally in tallies.values())


def test_a_profile_by_which_batches_do_not_pay_is_put_to_the_test() -> None:
    """Or nobody would ever know better."""
    curve = CURVES["steep"]
    source = Source("s", rate=0.5 * capacity(curve), deadline_s=10 * curve(1))
    for measured in ([(1, curve(1)), (2, 5 * curve(1)), (16, 40 * curve(1))], [(1, curve(1))], [(16, curve(16))]):
        policy = Tightfit({"m": Limits(32, 32, ROWS)}, {"m": measured}, 64)
        tally = simulate(policy, [source], {"m": curve}, 20)[0]["s"]
        assert len(tally.latencies) >= 0.9 * tally.sent
