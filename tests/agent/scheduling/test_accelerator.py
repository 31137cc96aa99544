"""What one accelerator does next, without a clock."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.errors import Reason
from agent.request import Request
from agent.scheduling.accelerator import PROBE_S, URGENT_S, Accelerator
from agent.scheduling.batch import Batch, Limits
from agent.scheduling.costs import Costs

ONE_S = 0.010
LIMITS = Limits(64, 64, rows=8)


def costs_of(one_s: float = ONE_S, key: object = ()) -> Costs:
    """Rows cost the same alone and together, and enough was seen."""
    costs = Costs([(1, one_s), (2, 2 * one_s)])
    for _ in range(4):
        costs.observe(key, 1, one_s)
    return costs


class Driver:
    """An accelerator with the time, and a request's many fields by default."""

    def __init__(self, *models: str, limits: Limits = LIMITS, costs: Costs | None = None) -> None:
        self.accelerator = Accelerator()
        self.now = 100.0
        self._numbers = itertools.count(1)
        for model in models or ("m",):
            self.accelerator.add(model, limits, costs or costs_of())

    def ask(self, within: float = 10.0, **fields: object) -> tuple[Request, object]:
        """The request and why it was refused."""
        request = Request(next(self._numbers), self.now + within, 0, (), (), (), "m", "a", arrived=self.now)
        request = msgspec.structs.replace(request, **fields)
        return request, self.accelerator.submit(request, self.now)

    def accepted(self, within: float = 10.0, **fields: object) -> Request:
        request, refused = self.ask(within, **fields)
        assert refused is None
        return request

    def run(self, took_s: float | None = None) -> Batch:
        """The next batch, to its end."""
        batch = self.accelerator.next(self.now)
        assert batch is not None
        self.now += batch.predicted_s if took_s is None else took_s
        self.accelerator.ended(batch, batch.predicted_s if took_s is None else took_s, self.now)
        return batch


def test_one_batch_at_a_time() -> None:
    driver = Driver()
    first, second = driver.accepted(), driver.accepted()
    batch = driver.accelerator.next(driver.now)
    assert batch is not None
    assert batch.requests == (first,)
    assert batch is driver.accelerator.running
    assert driver.accelerator.next(driver.now) is None
    driver.accelerator.ended(batch, ONE_S, driver.now)
    assert driver.run().requests == (second,)
    assert driver.accelerator.next(driver.now) is None
    with pytest.raises(ValueError, match="does not run"):
        driver.accelerator.ended(batch, ONE_S, driver.now)


def test_what_comes_while_it_is_busy_gathers_by_itself() -> None:
    costs = Costs([(1, 0.010), (8, 0.012)])
    for _ in range(3):
        costs.observe((), 1, 0.010)
    driver = Driver(costs=costs)
    driver.accepted()
    batch = driver.accelerator.next(driver.now)
    assert batch is not None
    assert batch.rows == 1
    for _ in range(6):
        driver.accepted()
    driver.accelerator.ended(batch, 0.010, driver.now)
    assert driver.run().rows == 6


# --- refusals


def test_what_cannot_be_in_time_is_refused_at_once_and_the_answer_says_why() -> None:
    driver = Driver()
    for _ in range(5):
        driver.accepted(within=0.054)
    driver.accelerator.next(driver.now)
    _, refused = driver.ask(within=0.055)
    assert refused is not None
    assert refused.reason is Reason.DEADLINE  # type: ignore[attr-defined]
    assert "in about 60 ms, and the deadline is in 55 ms" in refused.message  # type: ignore[attr-defined]
    driver.accepted(within=0.061)


def test_only_what_runs_before_it_counts() -> None:
    driver = Driver()
    for _ in range(20):
        driver.accepted(priority=200)
    driver.accelerator.next(driver.now)
    driver.accepted(within=0.021, priority=1)  # behind the one that runs
    driver.accepted(within=0.031, priority=199)  # and behind the one that is more important
    _, refused = driver.ask(within=0.021, priority=201)
    assert refused is not None


@given(st.floats(0.1, 3.0))
def test_an_idle_accelerator_refuses_nothing_for_a_guess(wrong: float) -> None:
    """A noisy profile at start-up: runs take 8.8 ms, whatever it said."""
    driver = Driver(costs=Costs([(1, 0.0088 * wrong), (2, 0.0173 * wrong)]))
    for _ in range(30):
        request = driver.accepted(within=0.0095)
        assert driver.run(took_s=0.0088).requests == (request,)
        driver.now += 0.001


def test_an_idle_accelerator_refuses_what_was_never_seen_to_be_so_fast() -> None:
    driver = Driver()
    driver.accepted(within=0.0095)
    driver.run()
    _, refused = driver.ask(within=0.008)
    assert refused is not None


def test_estimates_recover_though_they_refuse_everything() -> None:
    """The machine was slow for a while; deadlines that it can keep again are refused until a probe has shown that."""
    driver = Driver(costs=costs_of(0.030))
    driver.accepted(within=0.1)
    driver.run()
    outcomes = []
    for _ in range(400):
        _, refused = driver.ask(within=0.012)
        outcomes.append(refused is None)
        if refused is None:
            driver.run(took_s=0.009)
        driver.now += 0.01
    assert not outcomes[0]
    assert outcomes.index(True) * 0.01 <= PROBE_S + 0.01
    assert all(outcomes[-200:])


def test_probes_are_rare() -> None:
    driver = Driver(costs=costs_of(0.030))
    probes = 0
    start = driver.now
    while driver.now < start + 20:
        _, refused = driver.ask(within=0.012)
        if refused is None:
            driver.run(took_s=0.030)
            probes += 1
        driver.now += 0.05
    assert 10 <= probes <= 21


def test_a_probe_that_is_cancelled_is_not_the_last() -> None:
    driver = Driver(costs=costs_of(0.030))
    probe = driver.accepted(within=0.012)
    assert driver.ask(within=0.012)[1] is not None
    assert driver.accelerator.cancel(probe.id)
    driver.accepted(within=0.012)


def test_who_waits_is_told_as_soon_as_it_is_hopeless() -> None:
    driver = Driver()
    request = driver.accepted(within=0.050)
    driver.accelerator.pause("m")
    wakeup = driver.accelerator.next_wakeup(driver.now)
    assert wakeup is not None
    assert 0.040 <= wakeup - driver.now < 0.050
    assert driver.accelerator.expire(wakeup - 1e-6) == []
    assert driver.accelerator.expire(wakeup) == [request]
    assert driver.accelerator.next_wakeup(wakeup) is None
    assert driver.accelerator.expire(driver.now + 1) == []


def test_a_later_request_does_not_displace_one_that_was_accepted() -> None:
    driver = Driver()
    driver.accelerator.next(driver.now)
    for _ in range(4):
        driver.accepted(within=0.041)
    _, refused = driver.ask(within=0.035)
    assert refused is not None
    assert "accepted before" in refused.message  # type: ignore[attr-defined]
    driver.accepted(within=0.035, client="b")  # clients have their turns
    driver.accepted(within=0.035, priority=1)


def test_the_bounds_of_queue_and_client_hold() -> None:
    driver = Driver(limits=Limits(3, 2))
    driver.accepted()
    driver.accepted()
    assert driver.ask()[1].reason is Reason.CLIENT_QUEUE_FULL  # type: ignore[attr-defined]
    driver.accepted(client="b")
    assert driver.ask(client="c")[1].reason is Reason.QUEUE_FULL  # type: ignore[attr-defined]
    assert len(driver.accelerator) == driver.accelerator.waiting("m") == 3


def test_callers_without_a_slot_are_told_too() -> None:
    driver = Driver()
    for _ in range(4):
        driver.accepted(within=0.070)
    caller = Request(99, driver.now + 0.080, 0, (), (), (), client="a", arrived=driver.now)
    assert driver.accelerator.predict("m", caller, 2, driver.now) is None
    refused = driver.accelerator.predict("m", caller, 4, driver.now)
    assert refused is not None
    assert refused.reason is Reason.DEADLINE


def test_of_whom_nothing_is_known_only_what_goes_before_counts() -> None:
    driver = Driver()
    for _ in range(4):
        driver.accepted(within=0.070)
    before = Request(99, driver.now + 0.045, 0, (), (), (), client="a", priority=255, arrived=driver.now)
    assert driver.accelerator.predict("m", before, 0, driver.now, rows=0) is None
    assert driver.accelerator.predict("m", before, 0, driver.now) is not None
    assert driver.accelerator.predict("m", before, 0, driver.now + 0.010, rows=0) is not None


def test_who_is_less_important_than_others_lately_yields() -> None:
    driver = Driver()
    assert not driver.accelerator.yields(255, driver.now)
    driver.accepted(priority=100)
    driver.accepted(priority=200)
    assert [driver.accelerator.yields(each, driver.now) for each in (100, 101, 0)] == [False, True, True]
    assert not driver.accelerator.yields(255, driver.now + URGENT_S + 1)


# --- several models


def test_models_that_compete_have_the_accelerator_by_their_weight() -> None:
    driver = Driver(limits=Limits(1000, 1000))
    driver.accelerator.add("heavy", Limits(1000, 1000, weight=3.0), costs_of(0.020))
    for _ in range(400):
        driver.accepted(within=1000)
        driver.accepted(within=999, model="heavy")
    used = {"m": 0.0, "heavy": 0.0}
    while driver.now < 104:
        batch = driver.run()
        used[batch.model] += batch.predicted_s
    assert used["heavy"] / used["m"] == pytest.approx(3, rel=0.05)


def test_between_models_with_time_the_tighter_deadline_goes_first() -> None:
    driver = Driver("m", "n")
    driver.accepted(within=5)
    tight = driver.accepted(within=1, model="n")
    assert driver.run().requests == (tight,)


def test_priority_goes_over_models() -> None:
    driver = Driver("m", "n")
    driver.accepted(within=1)
    important = driver.accepted(within=9, model="n", priority=3)
    assert driver.run().requests == (important,)


def test_who_was_idle_is_owed_nothing() -> None:
    driver = Driver("m", "n", limits=Limits(1000, 1000))
    for _ in range(300):
        driver.accepted(within=100, model="n")
    for _ in range(100):
        driver.run()
    for _ in range(100):
        driver.accepted(within=50)
    turns = [driver.run().model for _ in range(100)]
    assert 45 <= turns.count("m") <= 55


def test_a_model_that_pauses_keeps_its_requests_and_others_run() -> None:
    driver = Driver("m", "n")
    waits, other = driver.accepted(within=1), driver.accepted(within=5, model="n")
    driver.accelerator.pause("m")
    assert driver.run().requests == (other,)
    assert driver.accelerator.next(driver.now) is None
    driver.accelerator.resume("m")
    assert driver.run().requests == (waits,)


def test_a_model_that_is_removed_gives_back_what_waited_and_what_runs_ends() -> None:
    driver = Driver()
    driver.accepted()
    rest = [driver.accepted(), driver.accepted()]
    batch = driver.accelerator.next(driver.now)
    assert batch is not None
    assert driver.accelerator.remove("m") == rest
    assert len(driver.accelerator) == 0
    assert driver.accelerator.next_wakeup(driver.now) is not None or not driver.accelerator.expire(driver.now + 100)
    driver.accelerator.ended(batch, 0.01, driver.now)
    assert driver.accelerator.next(driver.now) is None
    with pytest.raises(KeyError):
        driver.ask()


def test_models_are_added_once_and_rows_fit_a_batch() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="already"):
        driver.accelerator.add("m", LIMITS, Costs())
    for rows in (0, 9):
        with pytest.raises(ValueError, match="at most 8"):
            driver.ask(rows=rows)


# --- shared passes


def test_a_shared_pass_waits_a_little_for_those_that_come() -> None:
    driver = Driver(limits=Limits(8, 8, rows=1, batches=4), costs=Costs([(1, 1.0)]))
    driver.accepted()
    driver.run(took_s=1.0)
    first = driver.accepted()
    driver.accelerator.expect("m", 1)
    assert driver.accelerator.next(driver.now) is None
    wakeup = driver.accelerator.next_wakeup(driver.now)
    assert wakeup is not None
    assert driver.now < wakeup < driver.now + 0.2
    second = driver.accepted(key="other")
    driver.accelerator.expect("m", 0)
    batch = driver.run(took_s=1.0)
    assert batch.groups == ((first,), (second,))


# --- laws


def test_the_flood_does_not_starve_anyone() -> None:
    """With new requests of the highest priority for ever, who waits is served after its number has been halved away."""
    driver = Driver(limits=Limits(10_000, 10_000))
    patient = driver.accepted(within=1e6, priority=255)
    served = False
    for number in itertools.count():
        driver.accepted(within=0.5, priority=1, client=str(number))
        served = patient in driver.run().requests
        if served:
            break
        assert driver.now < 117
    assert driver.now >= 114


class Lives(RuleBasedStateMachine):
    """Every request that was accepted leaves once: by `next`, `expire`, `cancel` or `remove`."""

    def __init__(self) -> None:
        super().__init__()
        self.accelerator = Accelerator()
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.waiting: dict[int, Request] = {}
        self.models: dict[str, Limits] = {}
        self.running: Batch | None = None

    @rule(
        model=st.sampled_from("mno"), queue=st.integers(1, 9), per_client=st.integers(1, 5), rows=st.integers(1, 4),
        batches=st.sampled_from([1, 1, 3]), weight=st.sampled_from([0.5, 1, 4]), one=st.floats(0, 0.1),
    )  # fmt: skip
    def add(self, model: str, queue: int, per_client: int, rows: int, batches: int, weight: float, one: float) -> None:
        if model not in self.models:
            self.models[model] = Limits(queue, per_client, rows, batches, weight)
            self.accelerator.add(model, self.models[model], Costs([(1, one), (4, 1.5 * one)]))

    @precondition(lambda self: self.models)
    @rule(
        pick=st.integers(0, 2), within=st.floats(-0.01, 1), client=st.sampled_from("abc"), rows=st.integers(1, 4),
        priority=st.sampled_from([0, 1, 2, 128, 255]), key=st.sampled_from("kl"), times=st.integers(1, 4),
    )  # fmt: skip
    def submit(self, pick: int, within: float, client: str, rows: int, priority: int, key: str, times: int) -> None:
        model = sorted(self.models)[pick % len(self.models)]
        limits = self.models[model]
        for _ in range(times):
            request = Request(
                next(self.numbers), self.now + within, 0, (), (), (), model, client, priority, min(rows, limits.rows),
                key, self.now,
            )  # fmt: skip
            of_model = [each for each in self.waiting.values() if each.model == model]
            of_client = [each for each in of_model if each.client == client]
            refused = self.accelerator.submit(request, self.now)
            if refused is None:
                assert within > 0
                assert len(of_model) < limits.queue
                assert len(of_client) < limits.per_client
                self.waiting[request.id] = request
            elif refused.reason is Reason.QUEUE_FULL:
                assert len(of_model) == limits.queue
            elif refused.reason is Reason.CLIENT_QUEUE_FULL:
                assert len(of_client) == limits.per_client

    @rule(after=st.floats(0, 3))
    def wait(self, after: float) -> None:
        self.now += after

    @rule()
    def begin(self) -> None:
        batch = self.accelerator.next(self.now)
        if batch is None:
            return
        assert self.running is None
        self.running = batch
        limits = self.models[batch.model]
        assert 1 <= len(batch.groups) <= limits.batches
        assert batch.rows == sum(each.rows for each in batch.requests)
        for group in batch.groups:
            assert sum(each.rows for each in group) <= limits.rows
            assert len({each.key for each in group}) == 1
        for request in batch.requests:
            assert request.deadline > self.now
            assert self.waiting.pop(request.id) == request

    @precondition(lambda self: self.running)
    @rule(took=st.one_of(st.none(), st.floats(0, 1)))
    def end(self, took: float | None) -> None:
        self.now += took or 0
        assert self.running is not None
        self.accelerator.ended(self.running, took, self.now)
        self.running = None

    @rule()
    def expire(self) -> None:
        for request in self.accelerator.expire(self.now):
            assert self.waiting.pop(request.id) == request
        assert all(request.deadline > self.now for request in self.waiting.values())

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        number = sorted(self.waiting)[pick % len(self.waiting)]
        assert self.accelerator.cancel(number)
        del self.waiting[number]
        assert not self.accelerator.cancel(number)

    @precondition(lambda self: self.models)
    @rule(
        pick=st.integers(0, 2), what=st.sampled_from(["pause", "resume", "remove", "expect"]), coming=st.integers(0, 2)
    )
    def steer(self, pick: int, what: str, coming: int) -> None:
        model = sorted(self.models)[pick % len(self.models)]
        if what == "remove":
            del self.models[model]
            for request in self.accelerator.remove(model):
                assert self.waiting.pop(request.id) == request
            assert all(request.model != model for request in self.waiting.values())
        elif what == "expect":
            self.accelerator.expect(model, coming)
        else:
            getattr(self.accelerator, what)(model)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.accelerator) == len(self.waiting)
        wakeup = self.accelerator.next_wakeup(self.now)
        if self.waiting:
            assert wakeup is not None
            assert wakeup <= min(request.deadline for request in self.waiting.values())


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase


def first_in_first_out(accepted: list[Request], batches: list[tuple[float, float, int]]) -> dict[int, float]:
    """When each would have had its answer in batches of these times and numbers of requests."""
    ends = {}
    left = sorted(accepted, key=lambda request: (request.arrived, request.id))
    for begin, end, size in batches:
        for request in [each for each in left if each.arrived <= begin][:size]:
            left.remove(request)
            ends[request.id] = end
    return ends


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.03), st.floats(0.005, 0.3)), min_size=1, max_size=60),
    st.sampled_from([1.0, 0.5, 0.1]),
)
def test_no_deadline_is_missed_that_first_in_first_out_would_have_met(
    asked: list[tuple[float, float]], slope: float
) -> None:
    """Of one priority and client, in the same batches, by more than the time of one batch."""

    def seconds(rows: int) -> float:
        return ONE_S * (1 + slope * (rows - 1))

    costs = Costs([(rows, seconds(rows)) for rows in range(1, 9)])
    for _ in range(3):
        for rows in range(1, 9):
            costs.observe((), rows, seconds(rows))
    driver = Driver(costs=costs)
    accelerator = driver.accelerator
    accepted: list[Request] = []
    batches: list[tuple[float, float, int]] = []
    ends: dict[int, float] = {}

    def go_on_to(time: float) -> None:
        """Let batches end and begin, and deadlines pass."""
        while True:
            accelerator.expire(driver.now)
            if accelerator.running is None and (batch := accelerator.next(driver.now)):
                batches.append((driver.now, driver.now + seconds(batch.rows), len(batch.requests)))
                ends.update((request.id, batches[-1][1]) for request in batch.requests)
            due = min(
                batches[-1][1] if accelerator.running else math.inf, accelerator.next_wakeup(driver.now) or math.inf
            )
            if due > time:
                driver.now = time
                return
            driver.now = max(due, driver.now)
            if accelerator.running and batches[-1][1] <= driver.now:
                accelerator.ended(accelerator.running, seconds(accelerator.running.rows), driver.now)

    for after, within in asked:
        go_on_to(driver.now + after)
        request, refused = driver.ask(within)
        if refused is None:
            accepted.append(request)
        go_on_to(driver.now)
    go_on_to(driver.now + 1)

    longest = max((end - begin for begin, end, _ in batches), default=0.0)
    would_end = first_in_first_out(accepted, batches)
    for request in accepted:
        if would_end.get(request.id, math.inf) <= request.deadline:
            assert ends.get(request.id, math.inf) <= request.deadline + longest
