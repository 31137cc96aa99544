"""What a stream says, whatever its framing: results, errors, and what was lost.

`seq` counts the records of a stream from 1: those that came, in order, also the ones that were no valid requests; or,
of a subscription, the results of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from agent.errors import TABLE, Reason, RefusedError
from agent.http.codecs import OutputTensor, tensors_of
from targets.errors import TightfitError


class Timing(msgspec.Struct, frozen=True):
    """Where the time went, in microseconds: until the pass that it ran in began, that pass, and from the record's last
    byte to its answer."""

    queue_us: int
    compute_us: int
    total_us: int


class Record(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """What all records are: a JSON object that begins with its type."""


class Answer(Record, frozen=True, kw_only=True, tag="result"):
    """The answer to a request, as the Open Inference Protocol has it. `status` is the one of HTTP."""

    seq: int
    id: str | None = None
    status: int
    model_name: str
    model_version: str
    outputs: list[dict[str, Any]]
    timing: Timing | None = None


class Failure(Record, frozen=True, kw_only=True, tag="error"):
    """A record that has no answer, and why: `reason` and `status` as in docs/reasons.md."""

    seq: int
    id: str | None = None
    status: int
    reason: str
    error: str
    retry_after_s: int | None = None
    timing: Timing | None = None


class Lost(Record, frozen=True, tag="lost"):
    """Results `first` to `last` will not come: they are `count`. `restarted`: nor will those before the numbering began
    anew, of which nobody knows how many they were."""

    first: int
    last: int
    count: int
    restarted: bool = False


class Overflow(Record, frozen=True, tag="overflow"):
    """The last record: the reader was too slow. It can go on with `since`, the last that it was sent."""

    since: int
    status: int
    reason: str
    error: str


def to_json(record: Record) -> bytes:
    """The record on one line."""
    return _encoder.encode(record)


_encoder = msgspec.json.Encoder()


def answer(
    seq: int,
    id: str | None,  # noqa: A002 - the protocol's word
    name: str,
    version: str,
    outputs: Sequence[OutputTensor],
    timing: Timing | None = None,
) -> tuple[Answer, list[memoryview]]:
    """(record of a result, views of its raw tensors). Raises RefusedError(NOT_JSON) as `tensors_of` does."""
    tensors, raw = tensors_of(outputs)
    record = Answer(
        seq=seq,
        id=id,
        status=TABLE[Reason.OK].status,
        model_name=name,
        model_version=version,
        outputs=tensors,
        timing=timing,
    )
    return record, raw


def failure(seq: int, id: str | None, error: TightfitError, timing: Timing | None = None) -> Failure:  # noqa: A002
    """Record of an error; what is no RefusedError is a request that was not valid."""
    reason = error.reason if isinstance(error, RefusedError) else Reason.BAD_REQUEST
    said = TABLE[reason]
    return Failure(
        seq=seq,
        id=id,
        status=said.status,
        reason=reason.value,
        error=str(error),
        retry_after_s=error.retry_after_s if isinstance(error, RefusedError) else said.retry_after_s,
        timing=timing,
    )


def overflow(since: int) -> Overflow:
    """Record of a reader that was too slow, whom `since` was the last that it was sent."""
    said = TABLE[Reason.SLOW_READER]
    return Overflow(since, said.status, Reason.SLOW_READER.value, "results come faster than they are read")
