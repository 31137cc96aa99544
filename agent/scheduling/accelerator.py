"""What one accelerator does next: the queues of all models on it, one pass at a time. Pure.

Theory of operation. Requests wait in a queue per model (`agent.scheduling.queue`). Whoever drives it calls `next` when
something came or ended, runs the batch it gives, and says `ended`; so nothing waits for a batch to fill while the
accelerator is idle, and what comes while it is busy gathers by itself. It calls `expire` not later than `next_wakeup`,
and before `next`, and answers what it returns. Every request leaves exactly once: by `next`, `expire`, `remove` or
`cancel`, unless `submit` refused it.

*Which model.* The most important level first. Within it by earliest eligible deadline first (Stoica and Abdel-Wahab,
1995): each model's use of the accelerator is counted, divided by its weight; those that had no more than the mean may
go, and of them the one that must begin first does. Who comes back from idleness starts at the mean.

*Which request.* The first in the queue's order that can be done in time in all likelihood, else the first that can be
done in time at all: with more to do than can be done, nothing runs in vain while something would not.

*Who is refused.* Whoever cannot be done in time: at `submit`, with what is left of the running batch, what would run
before it, and its own run; and while it waits, at `expire`, as soon as its own run alone would be late. What is only
guessed refuses nobody, and where an accelerator has nothing else to do it takes the best run ever seen to refuse. An
estimate that refuses all would never be corrected: so a probe is let through when nothing of the model ran for a while.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from agent.errors import Reason
from agent.request import Refused, Request
from agent.scheduling.batch import Batch, Limits, Situation, choose, grouped, work
from agent.scheduling.costs import Costs
from agent.scheduling.gathering import Gathering
from agent.scheduling.queue import DEFAULT_PRIORITY, EXPIRED, LOWEST, Queue, Waiting

PROBE_S, PROBE = 1.0, 10.0
"""After how long without a run one is let through against the estimate: so long, or so many times the estimate."""
URGENT_S = 5.0
"""How long after a request others of less importance keep out of the way of the next."""


@dataclass(eq=False)
class _Lane:
    """One model: what waits, and what it used of the accelerator, in seconds by its weight.

    `alone_s` is what all that waits would take one by one, `kinds` how many wait of each cost's key and rows,
    and `worked` what `work` said since the last run, by key and rows.
    """

    model: str
    limits: Limits
    costs: Costs
    queue: Queue[Request]
    gathering: Gathering | None
    used: float = 0.0
    alone_s: float = 0.0
    kinds: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    worked: dict[tuple[Hashable, int], float] = field(default_factory=dict)
    ended: float = -math.inf
    coming: int = 0
    paused: bool = False
    probe: int | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What a model would do next: those of its most important level, the next first, and the rest."""

    lane: _Lane
    level: int
    equals: list[Request]
    company: list[Request]

    @property
    def lead(self) -> Request:
        return self.equals[0]


class Accelerator:
    """One queue of all models on one accelerator."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        # The model of every request that waits, how long it was likely to take alone when it came, and its kind.
        self._queued: dict[int, tuple[_Lane, float, tuple[Hashable, int]]] = {}
        self._running: Batch | None = None
        self._began = 0.0
        self._urgent: tuple[int, float] = LOWEST, -math.inf
        # Nothing that waits is hopeless before.
        self._expires = math.inf

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def running(self) -> Batch | None:
        """The batch that runs now."""
        return self._running

    def waiting(self, model: str) -> int:
        """How many requests of the model wait."""
        return len(self._lanes[model].queue)

    # --- models

    def add(self, model: str, limits: Limits, costs: Costs) -> None:
        """Take a model in. Raises ValueError when it is there already."""
        if model in self._lanes:
            raise ValueError(f"the accelerator has {model} already")
        queue: Queue[Request] = Queue(limits.queue, limits.per_client, share=attrgetter("rows"))
        self._lanes[model] = _Lane(
            model, limits, costs, queue, Gathering(limits.batches) if limits.shared else None, self._mean()
        )

    def remove(self, model: str) -> list[Request]:
        """Let a model go; gives what waited for it, each to be answered. A batch of it that runs goes on."""
        lane = self._lanes.pop(model)
        left = list(lane.queue)
        for request in left:
            self._forget(request.id)
        return left

    def pause(self, model: str) -> None:
        """Run nothing of it for now; what waits goes on waiting."""
        self._lanes[model].paused = True

    def resume(self, model: str) -> None:
        """Run it again."""
        self._lanes[model].paused = False

    def expect(self, model: str, coming: int) -> None:
        """So many hold a slot and are not submitted yet: where a pass is shared it waits for them, a little."""
        self._lanes[model].coming = coming

    # --- requests

    def submit(self, request: Request, now: float) -> Refused | None:
        """Queue it, or say why not. Raises ValueError when no batch could hold its rows, KeyError without its model."""
        lane = self._lanes[request.model]
        if not 1 <= request.rows <= lane.limits.rows:
            raise ValueError(f"a request of {request.rows} rows, at most {lane.limits.rows} make a batch")
        refused = lane.queue.full(request.client) or self._refuse(lane, request, request.key, request.rows, 0, now)
        if refused is not None and refused.reason is Reason.DEADLINE and self._may_probe(lane, request, now):
            lane.probe, refused = request.id, None
        if refused is not None:
            return refused
        if not len(lane.queue):
            lane.used = max(lane.used, self._mean())
        lane.queue.add(request)
        kind = lane.limits.key(request), request.rows
        alone_s = lane.costs.likely(*kind)
        self._queued[request.id] = lane, alone_s, kind
        lane.alone_s += alone_s
        lane.kinds[kind] = lane.kinds.get(kind, 0) + 1
        priority = request.priority or DEFAULT_PRIORITY
        if priority <= self._most_important(now):
            self._urgent = priority, now
        self._expires = min(self._expires, self._latest_start(lane, request))
        return None

    def predict(self, model: str, caller: Waiting, ahead: int, now: float, rows: int = 1) -> Refused | None:
        """Why a caller whose input is not known yet cannot be served in time, with `ahead` others before it that have
        no slot either; None when it can. It is taken for one of so many rows: with 0 it is what goes before it that
        counts, and not what it asks for."""
        lane = self._lanes[model]
        refused = self._refuse(lane, caller, None, rows, ahead, now)
        return None if refused is None or self._may_probe(lane, caller, now) else refused

    def yields(self, priority: int, now: float) -> bool:
        """Whether somebody more important than `priority` came lately, and so may any time: who has it leaves the last
        slot free, or the other would wait for a whole pass before its input is even read."""
        return (priority or DEFAULT_PRIORITY) > self._most_important(now)

    def cancel(self, id_: int) -> bool:
        """Forget a request; False when it is not (or no longer) queued."""
        if id_ not in self._queued:
            return False
        lane = self._forget(id_)
        lane.queue.remove(id_)
        if lane.probe == id_:
            lane.probe = None
        return True

    def expire(self, now: float) -> list[Request]:
        """Take out everything that cannot be done in time any more; each must be answered."""
        if now < self._expires:
            return []
        late = [
            request
            for lane in self._lanes.values()
            for request in lane.queue
            if self._latest_start(lane, request) <= now
        ]
        for request in late:
            self.cancel(request.id)
        self._expires = min(
            (self._latest_start(lane, request) for lane in self._lanes.values() for request in lane.queue),
            default=math.inf,
        )
        return late

    def next_wakeup(self, now: float) -> float | None:
        """When `expire` and `next` must be called at the latest, though nothing came or ended; None for never."""
        wakeup = self._expires
        if self._running is None:
            for lane in self._lanes.values():
                begins = self._begins(lane, now)
                if begins is not None and begins > now:
                    wakeup = min(wakeup, begins)
        return wakeup if wakeup < math.inf else None

    # --- batches

    def next(self, now: float) -> Batch | None:
        """Take out what runs now; None when there is nothing, or something runs."""
        if self._running is not None:
            return None
        candidates = [
            candidate for lane in self._lanes.values() if (candidate := self._candidate(lane, now)) is not None
        ]
        if not candidates:
            return None
        first = self._first(candidates)
        lane, lead = first.lane, first.lead
        key = lane.limits.key(lead)
        ends = now + lane.costs.likely(key, lead.rows)
        rivals = [(each.lane, each.lead) for each in candidates if each is not first]
        if len(lane.kinds) > 1:
            rivals += [(lane, each) for each in (*first.equals, *first.company) if not lane.limits.join(lead, each)]
        starts = [self._starts_surely(*rival) for rival in rivals]
        until = min([start for start in starts if start >= ends], default=math.inf)
        at = Situation(lane.costs, lane.limits, now, until, self._most_important(now))
        chosen = choose(first.equals, first.company, at)
        for request in chosen:
            lane.queue.serve(request)
            self._forget(request.id)
        rows = sum(request.rows for request in chosen)
        self._running = Batch(lane.model, grouped(chosen, lane.limits), rows, lane.costs.likely(key, rows))
        self._began = now
        return self._running

    def ended(self, batch: Batch, took_s: float | None, now: float) -> None:
        """The batch is over, after so long; None: it was lost, and says nothing of costs."""
        if batch is not self._running:
            raise ValueError("this batch does not run")
        self._running = None
        lane = self._lanes.get(batch.model)
        if lane is None:
            return
        if lane.probe in {request.id for request in batch.requests}:
            lane.probe = None
        lane.used += (now - self._began) / lane.limits.weight
        if took_s is None:
            return
        lane.ended = now
        lane.worked.clear()
        lane.costs.observe(lane.limits.key(batch.groups[0][0]), batch.rows, took_s)
        if lane.gathering is not None:
            lane.gathering.ended(len(batch.requests), len(lane.queue), took_s, now)
        # Costs have changed. A bound will do: `expire`, if it is called then, looks at each.
        self._expires = min((_first_expiry(each) for each in self._lanes.values() if len(each.queue)), default=math.inf)

    def _forget(self, id_: int) -> _Lane:
        """A request leaves its queue."""
        lane, alone_s, kind = self._queued.pop(id_)
        lane.alone_s -= alone_s
        lane.kinds[kind] -= 1
        if not lane.kinds[kind]:
            del lane.kinds[kind]
        return lane

    def _most_important(self, now: float) -> int:
        """The least priority number that came lately."""
        priority, at = self._urgent
        return priority if now <= at + URGENT_S else LOWEST

    # --- which is next

    def _candidate(self, lane: _Lane, now: float) -> _Candidate | None:
        begins = self._begins(lane, now)
        if begins is None or begins > now:
            return None
        able = lane.queue.ranked(now)
        if now >= self._expires:
            able = [each for each in able if self._latest_start(lane, each[1]) > now]
        if not able:
            return None
        level = able[0][0][0]
        equals = [request for rank, request in able if rank[0] == level]
        company = [request for _, request in able[len(equals) :]]
        first = next((at for at, each in enumerate(equals) if self._starts_surely(lane, each) >= now), 0)
        return _Candidate(lane, level, [*equals[first:], *equals[:first]], company)

    def _first(self, candidates: list[_Candidate]) -> _Candidate:
        if len(candidates) == 1:
            return candidates[0]
        level = min(each.level for each in candidates)
        candidates = [each for each in candidates if each.level == level]
        mean = _mean(each.lane for each in candidates)
        eligible = [each for each in candidates if each.lane.used <= mean] or candidates
        return min(eligible, key=lambda each: self._starts_surely(each.lane, each.lead))

    def _begins(self, lane: _Lane, now: float) -> float | None:
        if lane.paused:
            return None
        if lane.gathering is None:
            return now if len(lane.queue) else None
        return lane.gathering.begins_at(len(lane.queue), lane.coming, now)

    def _mean(self) -> float:
        running = self._running and self._running.model
        return _mean(lane for lane in self._lanes.values() if len(lane.queue) or lane.model == running)

    # --- who is refused

    def _refuse(self, lane: _Lane, entry: Waiting, key: Hashable, rows: int, ahead: int, now: float) -> Refused | None:
        left = entry.deadline - now
        if left <= 0:
            return EXPIRED
        if lane.limits.shared:
            key = () if key is not None else None
        if lane.paused or not lane.costs.known(key):
            return None
        at_most = lane.costs.likely(key, rows)
        if ahead:
            at_most += ahead * lane.costs.likely(None, 1)
        if self._remaining(now) + at_most + sum([each.alone_s for each in self._lanes.values()]) <= left:
            # Even one by one, and whatever goes before: the common case takes no longer to see where many wait.
            return None
        before, after = self._around(lane, entry, now)
        if self._running is None and not before and not ahead and not self._others_before(lane, entry, math.inf, now):
            needed = lane.costs.least(key, rows)
        else:
            before[key] = before.get(key, 0) + rows + ahead
            own = sum([_work(lane, of, each) for each, of in before.items()])
            needed = self._remaining(now) + own + self._others_before(lane, entry, own / lane.limits.weight, now)
        if needed > left:
            return Refused(
                Reason.DEADLINE,
                f"the answer would be there in about {needed * 1e3:.0f} ms, and the deadline is in {left * 1e3:.0f} ms",
            )
        if self._displaces(lane, entry, key, rows, now + needed, after, now):
            return Refused(Reason.DEADLINE, "a request of this client that was accepted before would miss its deadline")
        return None

    def _around(self, lane: _Lane, entry: Waiting, now: float) -> tuple[dict[Hashable, int], list[Request]]:
        """The rows of each key that go before it, and the requests that go after it, in order."""
        rows: dict[Hashable, int] = {}
        if lane.queue.is_last(entry, now):
            for (key, each), count in lane.kinds.items():
                rows[key] = rows.get(key, 0) + each * count
            return rows, []
        before, after = lane.queue.around(entry, now)
        for request in before:
            key = lane.limits.key(request)
            rows[key] = rows.get(key, 0) + request.rows
        return rows, after

    def _displaces(
        self, lane: _Lane, entry: Waiting, key: Hashable, rows: int, end: float, after: list[Request], now: float
    ) -> bool:
        """Whether an equal of the same client would be in time, and is not any more where `entry` goes before it."""
        if not after:
            return False
        level = lane.queue.level(entry, now)
        each_s = _work(lane, lane.limits.rows, key) / lane.limits.rows
        for request in after:
            if lane.queue.level(request, now) != level:
                return False
            end += request.rows * each_s
            if request.client == entry.client and end - rows * each_s <= request.deadline < end:
                return True
        return False

    def _may_probe(self, lane: _Lane, entry: Waiting, now: float) -> bool:
        """Whether a run would tell more than the estimate does."""
        if entry.deadline <= now or len(lane.queue) or lane.probe is not None:
            return False
        if self._running is not None and self._running.model == lane.model:
            return False
        return now - lane.ended >= max(PROBE_S, PROBE * lane.costs.likely(None, 1))

    def _others_before(self, lane: _Lane, entry: Waiting, share: float, now: float) -> float:
        """Seconds of other models that run before it: all more important, and of the equally important those that are
        more urgent or whose model is owed, up to the share that is theirs while so much of its own model runs."""
        level = lane.queue.level(entry, now)
        seconds = 0.0
        for other in self._lanes.values():
            if other is lane or other.paused or not len(other.queue):
                continue
            equal = 0.0
            for request in other.queue:
                its = other.queue.level(request, now)
                if its < level:
                    seconds += other.costs.least(other.limits.key(request), request.rows)
                elif its == level and (request.deadline < entry.deadline or other.used < lane.used):
                    equal += other.costs.least(other.limits.key(request), request.rows)
            seconds += min(equal, share * other.limits.weight)
        return seconds

    def _remaining(self, now: float) -> float:
        return 0.0 if self._running is None else max(self._began + self._running.predicted_s - now, 0.0)

    # --- what is late

    def _latest_start(self, lane: _Lane, request: Request) -> float:
        """From when on it is hopeless."""
        if request.id == lane.probe:
            return request.deadline
        return request.deadline - lane.costs.least(lane.limits.key(request), request.rows)

    def _starts_surely(self, lane: _Lane, request: Request) -> float:
        """Until when its beginning suffices in all likelihood."""
        return request.deadline - lane.costs.surely(lane.limits.key(request), request.rows)


def _work(lane: _Lane, rows: int, key: Hashable) -> float:
    """Seconds that so many rows of one key take."""
    said = lane.worked.get((key, rows))
    if said is None:
        said = lane.worked[key, rows] = work(rows, key, lane.costs, lane.limits)
    return said


def _first_expiry(lane: _Lane) -> float:
    """A time before which nothing that waits of it is hopeless."""
    return lane.queue.earliest - max([lane.costs.least(*kind) for kind in lane.kinds])


def _mean(lanes: Iterable[_Lane]) -> float:
    """What each of them used, on the average of their weights."""
    used = weight = 0.0
    for lane in lanes:
        used += lane.limits.weight * lane.used
        weight += lane.limits.weight
    return used / weight if weight else 0.0
