"""A request from its head to its answer, as the gateway keeps it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.errors import RefusedError
from agent.request import Refused

if TYPE_CHECKING:
    from agent.scheduling.batch import Batch
    from agent.served import Entry, Served
    from agent.statistics import Statistics

REQUEST_ID, TRACE_PARENT = "X-Request-Id", "traceparent"
"""Headers by which a client names a request, and its place in a trace (W3C Trace Context, section 3.2)."""

# Of this run of the agent: after a start numbers begin again.
_EPOCH = secrets.token_hex(4)

Hear = Callable[[Any, RefusedError | None], None]
"""Takes what a call is answered with, or why it is refused."""


@dataclass(eq=False, slots=True)
class Call:
    """One request on its way. Times are of the monotonic clock, in seconds.

    `client` is whom the queues are shared fairly between, `counted` whether the call is among those it may have; it is
    `dated` where the deadline is the client's own. `entry`
    is the model that was asked for, `served` the version whose slot the call holds; `name` is what was asked for where
    there is no entry of it, as of an ensemble, or not yet. `statistics` are those that it counts in. `answer` is
    what its handler awaits now, `hear` who hears it instead.

    `seated` is when it had its slot, `queued` when its first pass could begin, `began` when that did, 0 where it needed
    none, `compute_s` what its passes took, and `ended` when the last did. `cache_s` is what looking for a kept answer
    took, and `cache_hit` whether there was one, None where none are kept. `rows` are those of its batch's axis,
    `inputs` the bytes of each input in its slot, and `batch` is what it ran in last. `echo` are the ids that the client
    gave it, for logs.
    """

    id: int
    arrived: float
    deadline: float
    client: str
    priority: int = 0
    dated: bool = False
    counted: bool = False
    entry: Entry | None = None
    served: Served | None = None
    slot: int | None = None
    name: str = ""
    statistics: Statistics | None = None
    answer: asyncio.Future[Any] | None = None
    hear: Hear | None = None
    seated: float = 0.0
    queued: float = 0.0
    began: float = 0.0
    compute_s: float = 0.0
    ended: float = 0.0
    cache_s: float = 0.0
    cache_hit: bool | None = None
    rows: int = 1
    inputs: tuple[int, ...] = ()
    batch: Batch | None = None
    echo: Mapping[str, str] = field(default_factory=dict)

    @property
    def seat(self) -> tuple[Served, int]:
        """The version that runs it, and the slot that it holds there. Only of a call that was admitted."""
        if self.served is None or self.slot is None:
            raise RuntimeError(f"call {self.id} was not admitted")
        return self.served, self.slot

    @property
    def queue_s(self) -> float:
        """How long it waited, at the door and in the queue. Only of a call whose passes began."""
        return self.seated - self.arrived + self.began - self.queued

    def waited_s(self, now: float) -> float:
        """The same of any call: of one that still waits, until now."""
        if not self.seated:
            return now - self.arrived
        return self.seated - self.arrived + ((self.began or now) - self.queued if self.queued else 0.0)

    @property
    def batch_rows(self) -> int:
        """Rows that went through the engine together with its own, these included; 0 where it did not run."""
        groups = self.batch.groups if self.batch else ()
        mine = next((group for group in groups if any(each.id == self.id for each in group)), ())
        return sum([each.rows for each in mine])

    @property
    def trace_id(self) -> str:
        """Of the trace that it is part of; empty where it is of none."""
        return self.echo.get(TRACE_PARENT, "")[3:35]

    @property
    def is_traced(self) -> bool:
        """Whether somebody keeps the trace: its last field is a byte of flags, whose lowest bit says so."""
        parent = self.echo.get(TRACE_PARENT, "")
        return parent != "" and int(parent[53:55], 16) & 1 == 1

    @property
    def request_id(self) -> str:
        """What it is called in logs and traces: as its client has it, else a name that no other request has."""
        return self.echo.get(REQUEST_ID) or f"{_EPOCH}-{self.id}"

    @property
    def ids(self) -> dict[str, str]:
        """By which lines of the log that are of it are found."""
        return {"request_id": self.request_id} | ({"trace_id": self.trace_id} if self.trace_id else {})

    def goes_by(self, others: Collection[Call]) -> None:
        """Take the times of calls side by side that it is put together of: at each stage those of the last."""
        self.seated, self.queued = max(each.seated for each in others), max(each.queued for each in others)
        self.began, self.ended = max(each.began for each in others), max(each.ended for each in others)
        self.compute_s, self.rows = max(each.compute_s for each in others), max(each.rows for each in others)

    def resolve(self, value: Any = None) -> None:
        """Hand the handler what it waits for, if it still does."""
        if self.hear is not None:
            self._tell(value, None)
        elif self.answer is not None and not self.answer.done():
            self.answer.set_result(value)

    def reject(self, refused: Refused) -> None:
        """Have what the handler waits for raise RefusedError, if it still waits."""
        if self.hear is not None:
            self._tell(None, RefusedError(refused.reason, refused.message))
        elif self.answer is not None and not self.answer.done():
            self.answer.set_exception(RefusedError(refused.reason, refused.message))

    async def answered(self) -> Any:
        """Wait for `resolve` or `reject`."""
        if self.answer is None:
            self.answer = asyncio.get_running_loop().create_future()
        try:
            return await self.answer
        finally:
            self.answer = None

    def then(self, hear: Hear) -> None:
        """Have `hear(value, error)` called once, by the event loop, instead of waiting: there is neither task nor
        future. It may come after the call was settled."""
        self.hear = hear

    def _tell(self, value: Any, error: RefusedError | None) -> None:
        hear, self.hear = self.hear, None
        if hear is not None:
            asyncio.get_running_loop().call_soon(hear, value, error)
