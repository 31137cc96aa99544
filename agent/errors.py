"""Why a request ended as it did: one table from reason to HTTP status, for every transport to come."""

from __future__ import annotations

import enum
from typing import NamedTuple

from targets.errors import TightfitError


class Reason(str, enum.Enum):
    """How a request ended. The value stands in metrics and logs."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    SLOW_BODY = "slow_body"
    NOT_JSON = "not_json"
    DISCONNECTED = "disconnected"
    SLOW_READER = "slow_reader"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    DRAINING = "draining"
    ENGINE_DOWN = "engine_down"
    ENGINE_ERROR = "engine_error"
    OUTPUT_TOO_LARGE = "output_too_large"
    FAULT = "fault"


class Answer(NamedTuple):
    """HTTP status, and after how many seconds another try makes sense (None: not by waiting)."""

    status: int
    retry_after_s: int | None = None


TABLE: dict[Reason, Answer] = {
    Reason.OK: Answer(200),
    Reason.BAD_REQUEST: Answer(400),
    # The outputs cannot be said in JSON (NaN, infinity, bytes that are not UTF-8): the same request with binary
    # outputs succeeds, so it is the request that has to change.
    Reason.NOT_JSON: Answer(400),
    Reason.UNKNOWN_MODEL: Answer(404),
    Reason.SLOW_BODY: Answer(408),
    Reason.TOO_LARGE: Answer(413),
    Reason.UNSUPPORTED_ENCODING: Answer(415),
    # Nobody is there to read it; the number (nginx's) only stands in logs.
    Reason.DISCONNECTED: Answer(499),
    Reason.SLOW_READER: Answer(499),
    Reason.ENGINE_ERROR: Answer(500),
    Reason.OUTPUT_TOO_LARGE: Answer(500),
    Reason.FAULT: Answer(500),
    Reason.QUEUE_FULL: Answer(503, 1),
    Reason.DRAINING: Answer(503, 5),
    Reason.ENGINE_DOWN: Answer(503, 5),
    Reason.DEADLINE: Answer(504),
}


class RefusedError(TightfitError):
    """A request is answered with a reason instead of tensors."""

    def __init__(self, reason: Reason, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason


class AgentError(TightfitError):
    """The agent cannot start, or cannot go on."""


class ConfigError(AgentError):
    """The configuration file or a flag is not valid."""
