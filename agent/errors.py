"""Why a request ended as it did: one table from reason to what each transport says of it (docs/reasons.md)."""

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
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    NOT_JSON = "not_json"
    CONTROL_DISABLED = "control_disabled"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    DISCONNECTED = "disconnected"
    SLOW_READER = "slow_reader"
    CLIENT_BUSY = "client_busy"
    RATE_LIMITED = "rate_limited"
    CIRCUIT_OPEN = "circuit_open"
    QUEUE_FULL = "queue_full"
    CLIENT_QUEUE_FULL = "client_queue_full"
    SHED = "shed"
    DEADLINE = "deadline"
    DRAINING = "draining"
    MODEL_NOT_READY = "model_not_ready"
    MODEL_UNLOADING = "model_unloading"
    ENGINE_DOWN = "engine_down"
    ENGINE_ERROR = "engine_error"
    OUTPUT_TOO_LARGE = "output_too_large"
    FAULT = "fault"


class Mqtt(enum.IntEnum):
    """Reason codes that a PUBACK may carry: OASIS MQTT 5.0, sections 2.4 and 3.4.2.1; no others are needed."""

    SUCCESS = 0x00
    UNSPECIFIED_ERROR = 0x80
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    NOT_AUTHORIZED = 0x87
    TOPIC_NAME_INVALID = 0x90
    QUOTA_EXCEEDED = 0x97
    PAYLOAD_FORMAT_INVALID = 0x99


class Answer(NamedTuple):
    """What a transport says of a reason, in `meaning` as people read it.

    `retry_after_s`: after how many seconds another try makes sense (None: not by waiting). `serial` is one byte that
    no other reason has, and that never changes. Its upper half is the kind, so that a microcontroller knows what to do
    about a code that is newer than itself: 0x0_ answered, 0x1_ change the request, 0x2_ try again later, 0x3_ the agent
    failed, 0x4_ nobody was there to be answered.
    """

    status: int
    retry_after_s: int | None
    mqtt: Mqtt
    serial: int
    meaning: str


TABLE: dict[Reason, Answer] = {
    Reason.OK: Answer(200, None, Mqtt.SUCCESS, 0x00, "answered"),
    Reason.BAD_REQUEST: Answer(
        400, None, Mqtt.PAYLOAD_FORMAT_INVALID, 0x10, "the request is not valid, or its tensors do not match the model"
    ),
    # The same request with binary outputs succeeds, so it is the request that has to change.
    Reason.NOT_JSON: Answer(
        400,
        None,
        Mqtt.PAYLOAD_FORMAT_INVALID,
        0x11,
        "an output cannot be said in JSON (NaN, infinity, bytes that are not UTF-8): ask for it as binary data",
    ),
    Reason.UNKNOWN_MODEL: Answer(404, None, Mqtt.TOPIC_NAME_INVALID, 0x12, "no such model, or no such version of it"),
    Reason.SLOW_BODY: Answer(408, None, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x13, "the body did not arrive in time"),
    Reason.TOO_LARGE: Answer(413, None, Mqtt.QUOTA_EXCEEDED, 0x14, "the body is larger than any the model takes"),
    Reason.UNSUPPORTED_ENCODING: Answer(
        415,
        None,
        Mqtt.PAYLOAD_FORMAT_INVALID,
        0x15,
        "the body is of a type, or compressed in a way, that the agent does not know",
    ),
    Reason.SLOW_HEAD: Answer(
        408, None, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x19, "the head of the request did not arrive in time"
    ),
    Reason.CONTROL_DISABLED: Answer(
        403, None, Mqtt.NOT_AUTHORIZED, 0x16, "models are not loaded or unloaded on request"
    ),
    Reason.UNAUTHENTICATED: Answer(
        401, None, Mqtt.NOT_AUTHORIZED, 0x17, "nobody knows who asks, or the token is nobody's"
    ),
    Reason.FORBIDDEN: Answer(
        403,
        None,
        Mqtt.NOT_AUTHORIZED,
        0x18,
        "the caller lacks the role that this needs, or a page of another site asks",
    ),
    # How busy the server is and how much one client asks are different things to a client: RFC 6585, section 4.
    Reason.CLIENT_QUEUE_FULL: Answer(
        429, 1, Mqtt.QUOTA_EXCEEDED, 0x20, "as many requests of this client wait as may of one"
    ),
    Reason.CLIENT_BUSY: Answer(
        429, 1, Mqtt.QUOTA_EXCEEDED, 0x28, "as many connections, streams or requests of this client are open as may be"
    ),
    Reason.RATE_LIMITED: Answer(429, 1, Mqtt.QUOTA_EXCEEDED, 0x29, "this client asks more often than one may"),
    Reason.CIRCUIT_OPEN: Answer(
        503, 5, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x2A, "the model failed too often in a row, and is let rest"
    ),
    Reason.QUEUE_FULL: Answer(503, 1, Mqtt.QUOTA_EXCEEDED, 0x21, "as many requests wait as may"),
    # As long as the least time for which a level of degradation holds.
    Reason.SHED: Answer(
        503, 30, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x22, "under pressure, requests of this priority are not taken"
    ),
    Reason.DRAINING: Answer(503, 5, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x23, "the agent is stopping"),
    Reason.MODEL_NOT_READY: Answer(503, 5, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x24, "the model is not loaded now"),
    Reason.MODEL_UNLOADING: Answer(
        503, 5, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x25, "the model was unloaded before the request ran"
    ),
    Reason.ENGINE_DOWN: Answer(
        503, 5, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x26, "the engine process ended, and is being started again"
    ),
    # Only the client knows whether a later answer is worth another try.
    Reason.DEADLINE: Answer(
        504, None, Mqtt.IMPLEMENTATION_SPECIFIC_ERROR, 0x27, "the deadline passed, or could not have been met"
    ),
    Reason.ENGINE_ERROR: Answer(500, None, Mqtt.UNSPECIFIED_ERROR, 0x30, "the runtime failed on this input"),
    Reason.OUTPUT_TOO_LARGE: Answer(
        500, None, Mqtt.UNSPECIFIED_ERROR, 0x31, "an output is larger than the bundle's contract says"
    ),
    Reason.FAULT: Answer(500, None, Mqtt.UNSPECIFIED_ERROR, 0x32, "a fault of the agent's own"),
    # Nobody is there to read these; the number (nginx's) only stands in logs.
    Reason.DISCONNECTED: Answer(499, None, Mqtt.UNSPECIFIED_ERROR, 0x40, "the client went away"),
    Reason.SLOW_READER: Answer(499, None, Mqtt.UNSPECIFIED_ERROR, 0x41, "the client did not take its answer in time"),
}


class RefusedError(TightfitError):
    """A request is answered with a reason instead of tensors. `retry_after_s` is that of the table, where nobody knows
    better."""

    def __init__(self, reason: Reason, message: str, hint: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message, hint)
        self.reason = reason
        self.retry_after_s = TABLE[reason].retry_after_s if retry_after_s is None else retry_after_s


class AgentError(TightfitError):
    """The agent cannot start, or cannot go on."""


class ConfigError(AgentError):
    """The configuration file or a flag is not valid."""
