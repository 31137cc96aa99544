"""What runs together, and how much of it pays. Pure.

Theory of operation. A batch grows, request by request in the order of the queue, while that is allowed, and ends at the
size that paid. It is allowed while everybody in it will have an answer in time, in all likelihood; while the most
urgent of the others still will; and while it is short, since nothing can interrupt it. It pays where rows per second
grow by more than noise. On a CPU a batch of two mostly takes what two runs take, so single requests run and nobody
waits for another; on a GPU it may take what one does.

Costs of sizes that nobody measured are guesses: a batch is at most twice as large as any before; a single request runs
alone now and then, and where enough wait, twice as many as pay, so that it is known what that takes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from agent.request import Request
from agent.scheduling.costs import Costs
from agent.scheduling.queue import DEFAULT_PRIORITY

GAIN, STEP = 1.15, 1.02
"""How many times the rows per second of one request a batch must do, and of any smaller batch: less is noise."""
SLICE_S, SLICE = 0.020, 4.0
"""A batch may take so long, or so many times what its first request takes alone."""
HURRY_S, HURRY = 0.004, 1.25
"""The same where somebody more important may come any time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan's bytes and the configuration allow of one model.

    At most `queue` requests wait, `per_client` of one client. A batch has at most `rows` rows. A pass takes up to
    `batches` batches: more than one where weights are streamed, and reading them is what costs. A share of the
    accelerator goes by `weight` where models compete for it. A batch is to take at most `slice_s`, where one request
    alone does not take longer; None: what SLICE_S and SLICE say.
    """

    queue: int
    per_client: int
    rows: int = 1
    batches: int = 1
    weight: float = 1.0
    slice_s: float | None = None
    shared: bool = field(init=False, repr=False)
    """Whether one pass takes several batches, of whatever keys."""

    def __post_init__(self) -> None:
        if min(self.queue, self.per_client, self.rows, self.batches) < 1 or not self.weight > 0:
            raise ValueError(f"limits and weight must be positive, not {self}")
        object.__setattr__(self, "shared", self.batches > 1)

    def key(self, request: Request) -> Hashable:
        """What its cost goes by."""
        return () if self.shared else request.key

    def join(self, request: Request, other: Request) -> bool:
        """Whether they can go together, as far as their shapes go."""
        return self.shared or request.key == other.key


@dataclass(frozen=True, slots=True)
class Batch:
    """What the engine does next: one pass, of one batch where weights are not streamed.

    The requests of a group have equal keys and run as one batch of at most `Limits.rows` rows. `rows` are those of all
    groups. `predicted_s` is what it takes, as often less as more.
    """

    model: str
    groups: tuple[tuple[Request, ...], ...]
    rows: int
    predicted_s: float

    @property
    def requests(self) -> tuple[Request, ...]:
        """All of it, in the order of the groups."""
        return tuple(chain.from_iterable(self.groups))


class Groups:
    """Requests as batches of equal keys, as many and as large as the limits allow."""

    def __init__(self, limits: Limits) -> None:
        self.groups: list[list[Request]] = []
        self._limits = limits
        # The group of a key that is not full, and its rows.
        self._open: dict[Hashable, tuple[list[Request], int]] = {}

    def fits(self, request: Request) -> bool:
        """Whether one more does."""
        _, rows = self._open.get(request.key, (None, self._limits.rows))
        return rows + request.rows <= self._limits.rows or len(self.groups) < self._limits.batches

    def add(self, request: Request) -> None:
        """Put one in that fits."""
        group, rows = self._open.get(request.key, ([], self._limits.rows))
        if rows + request.rows > self._limits.rows:
            group, rows = [], 0
            self.groups.append(group)
        group.append(request)
        self._open[request.key] = group, rows + request.rows


def grouped(requests: Iterable[Request], limits: Limits) -> tuple[tuple[Request, ...], ...]:
    """As the batches of one pass: where that is not shared they were chosen to be one."""
    if not limits.shared:
        return (tuple(requests),)
    groups = Groups(limits)
    for request in requests:
        groups.add(request)
    return tuple(map(tuple, groups.groups))


@dataclass(frozen=True, slots=True)
class Situation:
    """What a batch is chosen in. It should end by `until`, for the sake of others, unless its first request alone would
    not; and be short where it takes along whoever has a larger number than the priority `urgent`."""

    costs: Costs
    limits: Limits
    now: float
    until: float = inf
    urgent: int = 255


def choose(equals: Sequence[Request], company: Sequence[Request], at: Situation) -> list[Request]:
    """What runs together of `equals`, one or more that are equally important, in the order of the queue, and of
    `company`, which is less so. The first is taken unless more of its equals are lost by that than by leaving it."""
    lead = equals[0]
    if (at.limits.rows == 1 and not at.limits.shared) or len(equals) + len(company) == 1:
        return [lead]
    if not at.limits.shared and not at.costs.fresh(at.limits.key(lead), lead.rows):
        return [lead]
    equals = [request for request in equals if at.limits.join(lead, request)]
    chosen = _grow(lead, chain(equals[1:], company), at)
    if more := _twice(chosen, equals, at):
        return more
    if at.limits.shared or _rest_in_time(chosen, equals, at):
        return chosen
    return _densest(chosen, equals, at)


def _grow(lead: Request, company: Iterable[Request], at: Situation) -> list[Request]:
    """`lead` and whom it can take along so that all are in time, up to the size that pays."""
    costs, limits, key = at.costs, at.limits, at.limits.key(lead)
    alone = costs.likely(key, lead.rows)
    margin = costs.margin if at.now + alone * costs.margin <= lead.deadline else 1.0
    chosen, rows, deadline = [lead], lead.rows, lead.deadline
    best, best_rate = 1, rows / alone if alone > 0 else 0.0
    least = GAIN * best_rate
    largest = 2 * max((*costs.sizes(key), lead.rows))
    groups = Groups(limits)
    groups.add(lead)
    for request in company:
        total = rows + request.rows
        if limits.shared:
            if not groups.fits(request):
                continue
        elif total > limits.rows or request.key != lead.key:
            continue
        seconds = costs.likely(key, total)
        if at.now + seconds * margin > min(deadline, request.deadline):
            continue
        if at.now + seconds > at.until:
            break
        if not limits.shared and (total > largest or seconds > _slice(limits, alone, _number(request) > at.urgent)):
            break
        chosen.append(request)
        if limits.shared:
            groups.add(request)
        rows, deadline = total, min(deadline, request.deadline)
        rate = rows / seconds if seconds > 0 else inf
        if limits.shared or rate >= max(least, STEP * best_rate):
            best, best_rate = len(chosen), rate
    return chosen[:best]


def _twice(chosen: list[Request], equals: Sequence[Request], at: Situation) -> list[Request]:
    """Twice the rows of `chosen`, now and then where nobody has seen lately what that takes and everybody would be in
    time if it took twice as long; else nothing. A guess by which larger batches do not pay would never be put to the
    test otherwise."""
    costs, limits, key = at.costs, at.limits, at.limits.key(equals[0])
    rows = 2 * _rows(chosen)
    if limits.shared or rows > limits.rows or not costs.curious(key, _rows(chosen)):
        return []
    seconds = 2 * costs.surely(key, _rows(chosen))
    if seconds > _slice(limits, costs.likely(key, equals[0].rows), _number(equals[0]) > at.urgent):
        return []
    more: list[Request] = []
    count = 0
    for request in equals:
        if count + request.rows <= rows and at.now + seconds <= min(request.deadline, at.until):
            more.append(request)
            count += request.rows
    return more if count == rows else []


def _rest_in_time(chosen: Sequence[Request], equals: Sequence[Request], at: Situation) -> bool:
    """Whether all others of equal importance can still run in time after `chosen`, in the batches that pay most."""
    costs, limits, key = at.costs, at.limits, at.limits.key(equals[0])
    taken = {request.id for request in chosen}
    size, seconds = _best(key, at.limits.rows, costs, limits)
    end, rows = at.now + costs.likely(key, _rows(chosen)), size
    for request in equals:
        if request.id in taken:
            continue
        rows += request.rows
        if rows > size:
            rows, end = request.rows, end + seconds
        if end > request.deadline:
            return False
    return True


def _densest(chosen: list[Request], equals: Sequence[Request], at: Situation) -> list[Request]:
    """Where not all can be in time: of `chosen` and the batches of each size that leave out whoever is in too much of a
    hurry for it, the one with most rows per second."""
    costs, limits, key = at.costs, at.limits, at.limits.key(equals[0])
    best, best_rate = chosen, _rows(chosen) / costs.likely(key, _rows(chosen))
    longest = min(_slice(limits, costs.likely(key, equals[0].rows), _number(equals[0]) > at.urgent), at.until - at.now)
    for size in (*costs.sizes(key), limits.rows):
        ends = at.now + costs.surely(key, size)
        batch: list[Request] = []
        rows = 0
        for request in equals:
            if request.deadline >= ends and rows + request.rows <= min(size, limits.rows):
                batch.append(request)
                rows += request.rows
        seconds = costs.likely(key, rows)
        if rows and seconds <= longest and rows >= STEP * best_rate * seconds:
            best, best_rate = batch, rows / seconds
    return best


def _rows(requests: Iterable[Request]) -> int:
    return sum(request.rows for request in requests)


def _number(request: Request) -> int:
    return request.priority or DEFAULT_PRIORITY


def work(rows: int, key: Hashable, costs: Costs, limits: Limits) -> float:
    """Seconds that so many rows of one key take, in the batches that pay most."""
    size, seconds = _best(key, rows, costs, limits)
    batches, rest = divmod(rows, size)
    return batches * seconds + (costs.likely(key, rest) if rest else 0.0)


def _best(key: Hashable, rows: int, costs: Costs, limits: Limits) -> tuple[int, float]:
    """The size of at most so many rows that pays most, and its seconds."""
    most = min(limits.rows * limits.batches, rows)
    alone = costs.likely(key, 1)
    longest = _slice(limits, alone, False)
    best, seconds = 1, alone
    for size in (*costs.sizes(key), most):
        cost = costs.likely(key, size)
        pays = size * alone >= GAIN * cost and size * seconds >= STEP * cost * best
        if best < size <= most and (limits.shared or (cost <= longest and pays)):
            best, seconds = size, cost
    return best, seconds


def _slice(limits: Limits, alone: float, hurry: bool) -> float:
    if limits.slice_s is not None:
        return limits.slice_s
    return max(HURRY_S, HURRY * alone) if hurry else max(SLICE_S, SLICE * alone)
